//! From arguments to a model that is ready to run: what `serve`, `run`, `logits`, `selftest` and `bench` begin with.

use std::io::IsTerminal;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use sha2::{Digest, Sha256};
use tf_checkpoint::{Checkpoint, GenerationConfig};
use tf_device::Device;
use tf_model::deepseek_v41::engram::EngramHash;
use tf_model::deepseek_v41::load::{LoadProgress, Weights};
use tf_model::deepseek_v41::shape::Shape;
use tf_model::deepseek_v41::{DeepseekV41, Options};
use tf_server::Identity;
use tf_text::tokenizer::Tokenizer;

use crate::arguments::Arguments;
use crate::build;
use crate::device;
use crate::failure::Failure;
use crate::inspect::Inspection;
use crate::locate::{Located, is_model, locate};
use crate::options::Environment;
use crate::resolve::{Loading, show_bytes};

/// Without a terminal, one line of progress at most so often.
const PLAIN_LINE_EVERY: Duration = Duration::from_secs(3);

/// A checkpoint that passed every check, before a weight is read.
pub struct Checked {
    pub name: String,
    pub checkpoint: Arc<Checkpoint>,
    pub tokenizer: Arc<Tokenizer>,
    pub shape: Shape,
    pub hash: EngramHash,
    pub fingerprint: String,
    pub generation: GenerationConfig,
    pub loading: Loading,
    /// Where the model runs.
    pub device: Device,
}

/// The model named by the first argument, by `--model`, or the built-in one. With `is_first_word` the first argument
/// may be something else than a model; then it stays for the caller.
///
/// # Errors
/// A name that leads nowhere.
pub fn located(
    arguments: &Arguments,
    environment: &Environment,
    is_first_word: bool,
) -> Result<(Located, Vec<String>), Failure> {
    let mut words = arguments.positionals.clone();
    let takes_first = match words.first() {
        Some(first) => !is_first_word || is_model(first),
        None => false,
    };
    let name = match takes_first {
        true => words.remove(0),
        false => arguments.text("model").unwrap_or(crate::demo::NAME).to_owned(),
    };
    Ok((locate(&name, arguments.text("revision").unwrap_or("main"), environment)?, words))
}

/// Checks files, headers, tokenizer and memory plan.
///
/// # Errors
/// Every reason that keeps it from being served, a line each.
pub fn checked(located: &Located, arguments: &Arguments) -> Result<Checked, Failure> {
    let device = device::open(arguments)?;
    let found = Inspection::of(located, arguments, device::site(&device));
    if let Some(failure) = found.failure() {
        return Err(failure);
    }
    let Inspection { checkpoint, shape, tokenizer, hash, fingerprint, loading, .. } = found;
    let (Some(checkpoint), Some(shape), Some(tokenizer), Some(hash), Some(fingerprint), Some(loading)) =
        (checkpoint, shape, tokenizer, hash, fingerprint, loading)
    else {
        return Err(Failure::run_time(format!("{} could not be judged; `tensorfold info` says more", located.name)));
    };
    let generation = checkpoint.generation_config().map_err(|error| Failure::run_time(error.to_string()))?;
    Ok(Checked {
        name: located.name.clone(),
        checkpoint: Arc::new(checkpoint),
        tokenizer: Arc::new(tokenizer),
        shape,
        hash,
        fingerprint: identity(&fingerprint.to_string(), &device::identity(&device)),
        generation,
        loading,
        device,
    })
}

/// Digest of checkpoint, numeric mode, backend and build: equal fingerprints promise equal replies. The CPU's level and
/// the number of threads are not part of it, since no bit depends on them.
fn identity(checkpoint: &str, backend: &str) -> String {
    let mut digest = Sha256::new();
    for part in [checkpoint, "release", backend, build::VERSION, build::COMMIT] {
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part);
    }
    let hex: String = digest.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!("tf-{hex}")
}

impl Checked {
    /// Packs the weights and reserves the caches.
    ///
    /// # Errors
    /// A value that is no number, or memory that the system refuses.
    pub fn model(&self, options: Options) -> Result<DeepseekV41, Failure> {
        let progress = Progress::new(&self.name);
        let report = |done: LoadProgress| progress.report(done);
        let weights = self.weights(options.threads, &report)?;
        progress.finish();
        DeepseekV41::new(self.shape.clone(), weights, self.hash.clone(), options)
            .map_err(|error| Failure::run_time(error.to_string()))
    }

    /// The weights, packed, with their n-gram rows where `--engram` says.
    ///
    /// # Errors
    /// As [`Checked::model`].
    pub fn weights(&self, threads: usize, report: &(dyn Fn(LoadProgress) + Sync)) -> Result<Weights, Failure> {
        let checkpoint = Arc::clone(&self.checkpoint);
        let weights = Weights::load(checkpoint, &self.shape, &self.device, threads, report)
            .map_err(|error| Failure::run_time(error.to_string()))?;
        weights.with_engram(self.loading.engram, &self.shape).map_err(|error| Failure::run_time(error.to_string()))
    }

    /// What replies say about this program and model.
    pub fn identity(&self) -> Identity {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Identity {
            version: build::VERSION.to_owned(),
            commit: build::COMMIT.to_owned(),
            backend: device::backend(&self.device).to_owned(),
            numerics: "release".to_owned(),
            fingerprint: self.fingerprint.clone(),
            created,
            trained_context: self.shape.max_position_embeddings as u32,
            size_bytes: Some(self.checkpoint.shards().map(|(_, bytes)| bytes).sum()),
        }
    }
}

/// Packing as people watch it: a bar on a terminal, else a line now and then. Nothing where it takes no time.
struct Progress {
    name: String,
    bar: Option<ProgressBar>,
    started: Instant,
    last_line: Mutex<Instant>,
}

impl Progress {
    fn new(name: &str) -> Progress {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style =
                ProgressStyle::with_template("{msg} {wide_bar} {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}");
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
                .with_message(format!("packing {name}"))
        });
        let now = Instant::now();
        Progress { name: name.to_owned(), bar, started: now, last_line: Mutex::new(now) }
    }

    fn report(&self, progress: LoadProgress) {
        if let Some(bar) = &self.bar {
            bar.set_length(progress.total_bytes);
            bar.set_position(progress.done_bytes);
            return;
        }
        let mut last = self.last_line.lock().unwrap_or_else(PoisonError::into_inner);
        if last.elapsed() < PLAIN_LINE_EVERY {
            return;
        }
        *last = Instant::now();
        let rate = progress.done_bytes as f64 / self.started.elapsed().as_secs_f64().max(1e-9);
        let left = progress.total_bytes.saturating_sub(progress.done_bytes) as f64 / rate.max(1.0);
        eprintln!(
            "packing {}: {} of {}, {}/s, {left:.0} s left",
            self.name,
            show_bytes(progress.done_bytes),
            show_bytes(progress.total_bytes),
            show_bytes(rate as u64)
        );
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fingerprint_names_the_checkpoint() {
        let one = identity("a", "cpu");
        assert!(one.starts_with("tf-") && one.len() == 19, "{one}");
        assert_eq!(one, identity("a", "cpu"));
        assert_ne!(one, identity("b", "cpu"));
        assert_ne!(one, identity("a", "cuda"), "another backend has other bits");
    }
}
