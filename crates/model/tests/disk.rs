//! Kept prefixes on a real disk under the production model: found again after a restart, with the bits of a cold run.

mod production;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use production::tiny_a;
use tf_engine::disk::{self, DiskIdentity, DiskLimits};
use tf_engine::model::{Drawn, Model, RoundPlan, SequenceView, SlotIndex, Window};
use tf_engine::spawn_with_disk;
use tf_engine::{Batch, CacheSource, EngineHandle, EngineLimits, Finished, Request, Sampling, WallClock};
use tf_model::deepseek_v41::{DeepseekV41, Options};

/// A directory that goes with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let dir = std::env::temp_dir().join(format!("tf-model-disk-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        Folder(dir)
    }

    fn files(&self) -> Vec<PathBuf> {
        let listed = std::fs::read_dir(&self.0).expect("the directory is there");
        let mut files: Vec<PathBuf> = listed.map(|entry| entry.expect("it can be listed").path()).collect();
        files.retain(|path| path.extension().is_some_and(|extension| extension == "tfkept"));
        files.sort();
        files
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

struct Server {
    engine: EngineHandle,
    thread: JoinHandle<()>,
    events: Arc<Mutex<Vec<String>>>,
}

impl Server {
    fn start(dir: Option<&Path>, options: Options, prefix_cache_bytes: u64) -> Server {
        let model = tiny_a().load(Options { context: 1024, slots: 3, round_rows: 128, ..options });
        let limits =
            EngineLimits { prefix_cache_bytes, snapshot_every: 64, ..EngineLimits::for_model(&model.limits()) };
        let events = Arc::new(Mutex::new(Vec::new()));
        let of_report = events.clone();
        let report = Arc::new(move |event: disk::DiskEvent| {
            of_report.lock().expect("nothing panics beside it").push(event.to_string());
        });
        let identity = DiskIdentity::of(&[&model.cache_layout().identity(true)]);
        let limit = DiskLimits { bytes: 1 << 30, min_free_bytes: 0, index_bytes: 1 << 30 };
        let disk = dir.map(|dir| disk::open(dir, limit, identity, report).expect("it can be written"));
        let (engine, thread) = spawn_with_disk(model, limits, Arc::new(WallClock::new()), disk).expect("these fit");
        Server { engine, thread, events }
    }

    /// Tokens, bits of log-probabilities and what it took.
    fn answer(&self, prompt: &[u32], snapshot_at: &[u32]) -> (Vec<u32>, Vec<u32>, Finished) {
        let asked = Request { logprobs: Some(0), snapshot_at: snapshot_at.to_vec(), ..Request::greedy(prompt, 6) };
        let mut reply = self.engine.submit(asked).expect("it fits");
        let (mut batch, mut tokens, mut bits) = (Batch::default(), Vec::new(), Vec::new());
        loop {
            reply.receive_blocking(&mut batch);
            tokens.extend(batch.tokens.iter().map(|row| row.token));
            bits.extend(batch.tokens.iter().map(|row| row.logprob.to_bits()));
            if let Some(finished) = batch.finished.take() {
                return (tokens, bits, finished);
            }
        }
    }

    /// What a SIGTERM does.
    fn drain(self) -> Vec<String> {
        self.engine.drain();
        self.thread.join().expect("the engine's thread ends");
        Arc::try_unwrap(self.events)
            .map_or_else(|events| events.lock().unwrap().clone(), |events| events.into_inner().unwrap())
    }
}

fn text(seed: u32, count: u32) -> Vec<u32> {
    (0..count).map(|index| (index * 37 + seed * 101 + index * index % 89) % 384).collect()
}

const PLENTY: u64 = 1 << 30;

#[test]
fn two_conversations_survive_a_restart_and_their_files_stay() {
    let folder = Folder::new("restart");
    let cold = Server::start(None, Options::default(), 0);
    let warm = Server::start(Some(&folder.0), Options::default(), PLENTY);
    let mut prompts = [text(1, 150), text(2, 170)];
    for prompt in &mut prompts {
        for turn in 0..3 {
            let (tokens, ..) = warm.answer(prompt, &[prompt.len() as u32 - 2]);
            prompt.extend(tokens);
            prompt.extend(text(turn + 5, 20));
        }
    }
    assert_eq!(warm.drain(), [""; 0]);
    let files = folder.files();
    assert!(files.len() >= 6, "{files:?}");

    let again = Server::start(Some(&folder.0), Options::default(), PLENTY);
    assert_eq!(again.engine.stats().disk.files, files.len() as u64);
    for (index, which) in [1, 1, 0].into_iter().enumerate() {
        let mut prompt = prompts[which].clone();
        prompt.extend(text(index as u32 + 70, 9));
        let (tokens, bits, finished) = again.answer(&prompt, &[]);
        let (cold_tokens, cold_bits, _) = cold.answer(&prompt, &[]);
        assert_eq!((tokens, bits), (cold_tokens, cold_bits), "resend {index}");
        let expected = if index == 1 { CacheSource::Ram } else { CacheSource::Disk };
        assert_eq!(finished.stats.cache.source, expected, "resend {index}: {:?}", finished.stats);
        assert!(finished.stats.cached_tokens + 60 >= prompt.len() as u32, "{:?}", finished.stats);
    }
    assert_eq!(again.engine.stats().disk.hits, 2);
    assert_eq!(again.drain(), [""; 0]);
    let later = folder.files();
    assert!(files.iter().all(|file| later.contains(file)), "a file went when it was read");
}

#[test]
fn each_state_inside_a_long_prompt_resumes_with_the_bits_of_a_cold_run() {
    let cold = Server::start(None, Options::default(), 0);
    let long = text(3, 900);
    let mut small = 0;
    for cut in (64..900).step_by(64) {
        // A prompt that ends far enough behind the state for the halo.
        let folder = Folder::new(&format!("inner-{cut}"));
        let first = Server::start(Some(&folder.0), Options::default(), PLENTY);
        first.answer(&long, &[]);
        first.drain();
        let mut prompt = long[..cut as usize].to_vec();
        prompt.extend(text(cut + 9, (900 - cut).min(800)));
        let again = Server::start(Some(&folder.0), Options::default(), PLENTY);
        let (tokens, bits, finished) = again.answer(&prompt, &[]);
        let (cold_tokens, cold_bits, _) = cold.answer(&prompt, &[]);
        assert_eq!((tokens, bits), (cold_tokens, cold_bits), "cut at {cut}");
        small += u32::from(finished.stats.cached_tokens == cut && finished.stats.cache.source == CacheSource::Disk);
        again.drain();
    }
    assert!(small > 3, "{small} states inside the prompt were used");
}

#[test]
fn edited_cut_and_foreign_files_are_refused_and_the_reply_stays_the_same() {
    let folder = Folder::new("edited");
    let cold = Server::start(None, Options::default(), 0);
    let warm = Server::start(Some(&folder.0), Options::default(), PLENTY);
    let prompt = text(4, 300);
    warm.answer(&prompt, &[]);
    warm.drain();
    let expected = cold.answer(&prompt, &[]);
    let whole: Vec<(PathBuf, Vec<u8>)> =
        folder.files().into_iter().map(|path| (path.clone(), std::fs::read(&path).expect("it is there"))).collect();
    let foreign = folder.0.join("00000000000000f0.tfkept");
    type Edit<'a> = &'a dyn Fn(&mut Vec<u8>);
    let edits: [(&str, Edit<'_>); 6] = [
        ("whole", &|_| {}),
        ("a bit of the contents", &|bytes| {
            let middle = bytes.len() - 500;
            bytes[middle] ^= 4;
        }),
        ("a bit of a token", &|bytes| bytes[200] ^= 1),
        ("cut short", &|bytes| bytes.truncate(bytes.len() / 2)),
        ("empty", &|bytes| bytes.clear()),
        ("longer", &|bytes| bytes.push(0)),
    ];
    for (what, edit) in edits {
        // What the server before this one wrote instead.
        folder.files().iter().for_each(|path| std::fs::remove_file(path).expect("it was listed"));
        for (path, bytes) in &whole {
            let mut bytes = bytes.clone();
            edit(&mut bytes);
            std::fs::write(path, bytes).expect("it can be written");
        }
        std::fs::write(
            &foreign,
            b"somebody's notes, longer than a header of ours would be, so that all of it is looked at",
        )
        .expect("it can be written");
        let again = Server::start(Some(&folder.0), Options::default(), PLENTY);
        let (tokens, bits, finished) = again.answer(&prompt, &[]);
        assert_eq!((&tokens, &bits), (&expected.0, &expected.1), "{what}");
        assert_eq!(finished.stats.cache.source == CacheSource::Disk, what == "whole", "{what}");
        let refused: u64 = again.engine.stats().disk.refused.iter().sum();
        let events = again.drain();
        assert_eq!(refused as usize, events.len(), "{what}: {events:?}");
        assert!(
            events.iter().any(|event| event.contains("00000000000000f0.tfkept is not used (foreign)")),
            "{events:?}"
        );
        assert_eq!(events.len() > 1, what != "whole", "{what}: {events:?}");
        assert!(foreign.exists(), "{what}");
    }
}

/// A model whose slot 0 holds the first `rows` of a prompt that ends at `prompt_end`.
fn part_of_a_prompt(rows: u32, prompt_end: u32) -> DeepseekV41 {
    let mut model = tiny_a().load(Options { context: 1024, slots: 2, round_rows: 512, ..Options::default() });
    let tokens = text(6, rows);
    let window = Window {
        slot: SlotIndex(0),
        start: 0,
        rows: 0..rows as usize,
        prompt_end,
        whole: false,
        draw: 0..0,
        logprobs: None,
        sequence: 0,
    };
    let plan = RoundPlan { tokens: tokens.clone(), windows: vec![window] };
    let sampling = Sampling::greedy();
    let view = SequenceView { sampling: &sampling, prompt: &tokens, reply: &[], given: &[] };
    model.forward(&plan, &[view], &mut Drawn::default()).expect("it is a plain prompt");
    model.keep(SlotIndex(0), rows);
    model
}

#[test]
fn a_state_inside_a_prompt_is_smaller_than_one_at_its_end() {
    let bytes = |prompt_end: u32| {
        let mut model = part_of_a_prompt(400, prompt_end);
        let snapshot = model.snapshot(SlotIndex(0), 400);
        let mut encoded = Vec::new();
        model.encode(&snapshot, &mut encoded);
        assert!(encoded.len() as u64 >= model.snapshot_bytes(&snapshot));
        assert_eq!(model.can_resume(&snapshot, 401), prompt_end == 400);
        assert!(model.can_resume(&snapshot, 1024));
        model.snapshot_bytes(&snapshot)
    };
    let (inside, end) = (bytes(1024), bytes(400));
    assert!(inside * 4 < end * 3, "{inside} bytes inside the prompt, {end} at its end");
}

#[test]
fn no_bytes_make_the_model_panic_or_lose_a_page() {
    let mut model = part_of_a_prompt(133, 133);
    let snapshot = model.snapshot(SlotIndex(0), 133);
    let mut encoded = Vec::new();
    model.encode(&snapshot, &mut encoded);
    let mut pages = Vec::new();
    assert!(model.read_pages(&snapshot, 0..2, &mut pages));
    let free = model.pages().free;
    let whole = model.decode(&encoded, None).expect("these are its own bytes");
    assert!(model.write_pages(&whole, 0, &pages));
    let mut again = Vec::new();
    assert!(model.read_pages(&whole, 0..2, &mut again));
    assert_eq!(again, pages);
    assert!(!model.write_pages(&whole, 1, &pages), "more pages than it has");
    assert!(!model.write_pages(&snapshot, 0, &pages), "pages that a slot has too");
    assert!(!model.write_pages(&whole, 0, &pages[1..]), "no whole pages");
    drop(whole);
    let mut taken = 0;
    for bit in (0..8 * 64).chain((8 * 64..8 * encoded.len()).step_by(997)) {
        let mut edited = encoded.clone();
        edited[bit / 8] ^= 1 << (bit % 8);
        if let Ok(decoded) = model.decode(&edited, Some((&snapshot, 1))) {
            model.restore(SlotIndex(1), &decoded);
            model.release(SlotIndex(1));
            taken += 1;
        }
    }
    for length in (0..encoded.len()).step_by(331) {
        assert!(model.decode(&encoded[..length], None).is_err(), "{length} bytes");
    }
    assert!(taken > 0, "contents alone can't be told from others");
    assert_eq!(model.pages().free, free);
}

#[test]
fn a_directory_in_use_is_said_at_the_start() {
    let folder = Folder::new("in-use");
    let limits = DiskLimits { bytes: 1 << 20, min_free_bytes: 0, index_bytes: 1 << 30 };
    let open = || disk::open(&folder.0, limits, DiskIdentity::of(&["a"]), Arc::new(|_| {}));
    let first = open().expect("nobody has it");
    let second = open().err().expect("the first has it").to_string();
    assert!(second.contains("in use by another server"), "{second}");
    drop(first);
    assert!(open().is_ok());
}
