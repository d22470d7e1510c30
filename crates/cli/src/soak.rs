//! `bench soak`: many clients for minutes against a server in a process of its own, which is killed on the way.

use std::path::PathBuf;
use std::time::Duration;

use tf_bench::Record;
use tf_bench::soak::{CONVERSATIONS, Plan};
use tf_model::deepseek_v41::memory::MemoryPlan;
use tf_model::deepseek_v41::pages::PAGE_POSITIONS;
use tokio::signal::unix::{SignalKind, signal};

use crate::arguments::{Arguments, Mistakes};
use crate::bench::record;
use crate::failure::Failure;
use crate::load;
use crate::locate::{Located, Place};
use crate::measure::{SEED, serve_words, serving};
use crate::options::Environment;

/// The share of the working set that kept prefixes get.
const KEPT_SHARE: u64 = 10;
/// Slots under load where nobody says: fewer than clients, so that requests queue too.
const SLOTS: usize = 32;

/// Measures with servers of its own.
///
/// # Errors
/// Wrong usage, a model that can't be served, a server that doesn't start.
pub fn run(arguments: &Arguments, located: &Located, environment: &Environment) -> Result<Record, Failure> {
    if arguments.text("url").is_some() {
        let text = "bench soak kills its server on the way, so it starts one itself: leave --url out";
        return Err(Mistakes(vec![text.to_owned()]).into());
    }
    let clients = arguments.count("clients").unwrap_or(64) as usize;
    let minutes = arguments.number("minutes").unwrap_or(1.0);
    let mut given = serve_words(arguments, clients.min(SLOTS));
    if let Place::Folder(folder) | Place::Hub { folder, .. } = &located.place {
        given.push(format!("--model={}", folder.display()));
        given.push(format!("--name={}", located.name));
    }
    let checked = load::checked(located, &serving(&given)?)?;
    let plan = &checked.loading.plan;
    let mut words = given.clone();
    if !arguments.is_given("prefix-cache-bytes") {
        words.push(format!("--prefix-cache-bytes={}", working_set(plan, clients as u64) / KEPT_SHARE));
    }
    let folder = Folder::new()?;
    words.push(format!("--cache-dir={}", folder.path.join("kept").display()));
    for words in [&mut words, &mut given] {
        words.extend(["--access-log=off", "--host=127.0.0.1"].map(str::to_owned));
    }
    let is_own = |word: &&String| {
        !["--parallel", "--prefix-cache", "--draft", "--threads"].iter().any(|own| word.starts_with(own))
    };
    let mut solo_words: Vec<String> = given.iter().filter(is_own).cloned().collect();
    solo_words.extend(["--parallel=1", "--prefix-cache=off", "--draft=off", "--threads=1"].map(str::to_owned));
    let settings = [
        ("clients", clients.to_string()),
        ("minutes", minutes.to_string()),
        ("seed", arguments.integer("seed").unwrap_or(SEED as i64).to_string()),
        ("server", words[1..].join(" ")),
    ];
    let mut record = record("bench soak", &checked, &checked.loading.options, &settings);
    let program = std::env::current_exe()
        .map_err(|error| Failure::run_time(format!("this program's own file can't be found: {error}")))?;
    let plan = Plan {
        program,
        hidden: environment
            .names()
            .filter(|name| name.starts_with(crate::options::PREFIX))
            .map(str::to_owned)
            .collect(),
        words,
        calm_words: given,
        solo_words,
        solo_servers: checked.loading.options.threads,
        folder: folder.path.clone(),
        clients,
        time: Duration::from_secs_f64(60.0 * minutes),
        seed: arguments.integer("seed").map_or(SEED, |seed| seed as u64),
        page: u64::from(PAGE_POSITIONS),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let say = |text: &str| eprintln!("soak: {text}");
    runtime.block_on(async {
        tokio::select! {
            ended = tf_bench::soak::run(&plan, &mut record, &say) => {
                ended.map_err(|error| Failure::run_time(error.to_string()))
            }
            // The servers end with what is dropped here.
            () = interrupted() => Err(Failure { code: 130, text: String::new() }),
        }
    })?;
    Ok(record)
}

/// Ready at the first SIGTERM or Ctrl-C.
async fn interrupted() {
    let (Ok(mut terminate), Ok(mut interrupt)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        return std::future::pending().await;
    };
    tokio::select! { _ = terminate.recv() => {}, _ = interrupt.recv() => {} }
}

/// Bytes that hold every conversation at once: half-grown on average, with a few states each.
fn working_set(plan: &MemoryPlan, clients: u64) -> u64 {
    clients * CONVERSATIONS * (u64::from(plan.context) / 4 * plan.position_bytes + 4 * plan.snapshot_bytes)
}

/// A folder for the time of the run.
struct Folder {
    path: PathBuf,
}

impl Folder {
    fn new() -> Result<Folder, Failure> {
        let path = std::env::temp_dir().join(format!("tensorfold-soak-{}", std::process::id()));
        std::fs::create_dir_all(&path)
            .map_err(|error| Failure::run_time(format!("{} can't be made: {error}", path.display())))?;
        Ok(Folder { path })
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What is left behind is small, and in the system's folder for such things.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}
