//! Kept prefixes on a real disk under the production model: found again after a restart, with the bits of a cold run.

mod production;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use production::tiny_a;
use tf_engine::disk::{self, DiskIdentity, DiskLimits};
use tf_engine::model::Model;
use tf_engine::{Batch, CacheSource, EngineHandle, EngineLimits, Finished, Request, WallClock, spawn_with_disk};
use tf_model::deepseek_v41::Options;

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
        let report = Box::new(move |event: disk::DiskEvent| {
            of_report.lock().expect("nothing panics beside it").push(event.to_string());
        });
        let identity = DiskIdentity::of(&[&model.cache_layout().identity(true)]);
        let limit = DiskLimits { bytes: 1 << 30, min_free_bytes: 0 };
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
    let edits: [(&str, &dyn Fn(&mut Vec<u8>)); 6] = [
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

#[test]
fn a_directory_in_use_is_said_at_the_start() {
    let folder = Folder::new("in-use");
    let limits = DiskLimits { bytes: 1 << 20, min_free_bytes: 0 };
    let open = || disk::open(&folder.0, limits, DiskIdentity::of(&["a"]), Box::new(|_| {}));
    let first = open().expect("nobody has it");
    let second = open().err().expect("the first has it").to_string();
    assert!(second.contains("in use by another server"), "{second}");
    drop(first);
    assert!(open().is_ok());
}
