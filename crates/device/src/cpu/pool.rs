//! A fixed set of threads that runs one launch at a time, cheaply enough for launches of microseconds.
//!
//! The caller is thread 0. The others wait for the next launch by spinning for a moment, then yielding, then parking, so
//! that a busy queue makes no system call and an idle one costs nothing. A launch allocates nothing. Which thread
//! computes what is decided by the launch (static ranges), never by who is free.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::*};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread};

/// Threads in one pool at most: the count has [`COUNT_BITS`] bits in the launch word.
pub const THREADS_MAX: usize = 1024;
const COUNT_BITS: u32 = 16;
const _: () = assert!(THREADS_MAX < 1 << COUNT_BITS);
/// In the count's place: the pool is being dropped.
const QUIT: u64 = (1 << COUNT_BITS) - 1;

/// Tries before a waiting thread yields, when every thread has a core and when it has not: a few microseconds. Longer would
/// hold up the very thread that is waited for where other programs have taken its core.
const SPINS: u32 = 150;
const SPINS_CROWDED: u32 = 8;
/// Yields before a waiting thread parks.
const YIELDS: u32 = 200;

/// Where the threads run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Wherever the system's scheduler puts them.
    Free,
    /// Thread `i` on the `i`-th core this process may use. Only where there are enough cores; the caller is not moved.
    Pinned,
}

/// See the module's text.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<Worker>,
    spins: u32,
}

struct Worker {
    thread: Thread,
    handle: Option<JoinHandle<()>>,
}

type Job = *const (dyn Fn(usize, usize) + Sync);

struct Shared {
    /// Launch number in the upper bits, taking-part thread count in the lower: one word, so that a late thread never
    /// sees one launch's number with another's count.
    launch: Line<AtomicU64>,
    /// Threads of this launch, the caller apart, that have not finished.
    running: Line<AtomicUsize>,
    /// Written by the caller while no thread runs, read by the threads that the launch word counts in.
    job: UnsafeCell<Option<Job>>,
    /// One flag a worker: it is parked, or about to be.
    parked: Vec<Line<AtomicBool>>,
    caller_parked: AtomicBool,
    caller_lock: Mutex<()>,
    caller_wake: Condvar,
    busy: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// On a cache line of its own, so that waiting for one value does not slow writes of another.
#[repr(align(128))]
struct Line<T>(T);

// SAFETY: `job` is written only by the caller of `run` while no worker is counted in (`busy` admits one caller), and
// read only by workers that `launch` counts in, for which the release store of `launch` orders the write before.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is used only inside the launch that it belongs to; see `Sync`.
unsafe impl Send for Shared {}

impl Pool {
    /// A pool of `threads` threads with the caller of [`Pool::run`] as the first; clamped to `1..=THREADS_MAX`.
    ///
    /// Where the system refuses a thread the pool is smaller; no result depends on it.
    pub fn new(threads: usize, placement: Placement) -> Pool {
        let threads = threads.clamp(1, THREADS_MAX);
        let cores = core_count();
        let spins = if threads <= cores { SPINS } else { SPINS_CROWDED };
        let shared = Arc::new(Shared {
            launch: Line(AtomicU64::new(0)),
            running: Line(AtomicUsize::new(0)),
            job: UnsafeCell::new(None),
            parked: (1..threads).map(|_| Line(AtomicBool::new(false))).collect(),
            caller_parked: AtomicBool::new(false),
            caller_lock: Mutex::new(()),
            caller_wake: Condvar::new(),
            busy: AtomicBool::new(false),
            panic: Mutex::new(None),
        });
        let pinned = placement == Placement::Pinned && threads <= cores;
        let mut workers = Vec::with_capacity(threads - 1);
        for index in 1..threads {
            let shared = shared.clone();
            let spawned = std::thread::Builder::new().name(format!("tf-cpu-{index}")).spawn(move || {
                if pinned {
                    pin_to_core(index);
                }
                work(&shared, index, spins);
            });
            let Ok(handle) = spawned else { break };
            workers.push(Worker { thread: handle.thread().clone(), handle: Some(handle) });
        }
        Pool { shared, workers, spins }
    }

    /// Threads of this pool, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `job(thread_index, thread_count)` on every thread and returns when all have finished.
    ///
    /// # Panics
    /// When `job` panics on any thread (after all have finished), or when `job` itself calls `run`.
    pub fn run<F: Fn(usize, usize) + Sync>(&self, job: F) {
        self.run_on(usize::MAX, job);
    }

    /// As [`Pool::run`] on at most `threads_max` threads; on one it is a plain call. For launches too small to share.
    pub fn run_on<F: Fn(usize, usize) + Sync>(&self, threads_max: usize, job: F) {
        let count = self.threads().min(threads_max);
        if count <= 1 {
            return job(0, 1);
        }
        self.run_shared(count, &job);
    }

    fn run_shared(&self, count: usize, job: &(dyn Fn(usize, usize) + Sync)) {
        let shared = &*self.shared;
        assert!(!shared.busy.swap(true, Acquire), "a launch was started inside a launch of the same pool");
        // SAFETY: only the lifetime is erased. `finish` below waits for every thread before this frame ends, whatever the job does.
        let erased: Job = unsafe {
            std::mem::transmute::<&(dyn Fn(usize, usize) + Sync), &'static (dyn Fn(usize, usize) + Sync)>(job)
        };
        // SAFETY: `busy` makes this the only caller, and no worker is counted in before the store to `launch` below.
        unsafe { *shared.job.get() = Some(erased) };
        shared.running.0.store(count - 1, Relaxed);
        let number = (shared.launch.0.load(Relaxed) >> COUNT_BITS) + 1;
        // SeqCst: either a worker sees this launch before it parks, or its parked flag is seen here.
        shared.launch.0.store(number << COUNT_BITS | count as u64, SeqCst);
        for (worker, parked) in self.workers.iter().zip(&shared.parked).take(count - 1) {
            if parked.0.load(SeqCst) {
                worker.thread.unpark();
            }
        }
        let own = catch_unwind(AssertUnwindSafe(|| job(0, count)));
        self.finish();
        let theirs = lock(&shared.panic).take();
        shared.busy.store(false, Release);
        if let Some(payload) = own.err().or(theirs) {
            resume_unwind(payload);
        }
    }

    /// Waits for the workers of a launch.
    fn finish(&self) {
        let shared = &*self.shared;
        if wait(self.spins, || shared.running.0.load(Acquire) == 0) {
            return;
        }
        let mut guard = lock(&shared.caller_lock);
        // SeqCst: either the last worker sees this flag, or its count is seen by the loop below.
        shared.caller_parked.store(true, SeqCst);
        while shared.running.0.load(SeqCst) != 0 {
            guard = shared.caller_wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        shared.caller_parked.store(false, SeqCst);
    }
}

/// Spins, then yields, until `done`; false when it is time to park.
#[inline]
fn wait(spins: u32, done: impl Fn() -> bool) -> bool {
    for _ in 0..spins {
        if done() {
            return true;
        }
        std::hint::spin_loop();
    }
    for _ in 0..YIELDS {
        if done() {
            return true;
        }
        std::thread::yield_now();
    }
    done()
}

fn work(shared: &Shared, index: usize, spins: u32) {
    let mut seen = 0;
    loop {
        let changed = || shared.launch.0.load(Acquire) != seen;
        if !wait(spins, changed) {
            let parked = &shared.parked[index - 1].0;
            parked.store(true, SeqCst);
            while shared.launch.0.load(SeqCst) == seen {
                std::thread::park();
            }
            parked.store(false, Relaxed);
        }
        seen = shared.launch.0.load(Acquire);
        let count = seen & ((1 << COUNT_BITS) - 1);
        if count == QUIT {
            return;
        }
        if index as u64 >= count {
            continue;
        }
        // SAFETY: this launch counts this thread in, so the caller wrote `job` before and waits for us now.
        let job = unsafe { (*shared.job.get()).expect("a launch has a job") };
        // SAFETY: the caller keeps the job alive until `running` is zero.
        let job = unsafe { &*job };
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| job(index, count as usize))) {
            lock(&shared.panic).get_or_insert(payload);
        }
        if shared.running.0.fetch_sub(1, SeqCst) == 1 && shared.caller_parked.load(SeqCst) {
            let _guard = lock(&shared.caller_lock);
            shared.caller_wake.notify_one();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Pool {
    fn drop(&mut self) {
        let number = (self.shared.launch.0.load(Relaxed) >> COUNT_BITS) + 1;
        self.shared.launch.0.store(number << COUNT_BITS | QUIT, SeqCst);
        for worker in &mut self.workers {
            worker.thread.unpark();
            if let Some(handle) = worker.handle.take() {
                // A worker catches the panics of its jobs, so this join brings none that were not reported.
                let _ = handle.join();
            }
        }
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pool({} threads)", self.threads())
    }
}

/// Cores that this process may use.
pub fn core_count() -> usize {
    std::thread::available_parallelism().map_or(1, |count| count.get())
}

/// Binds the calling thread to the `index`-th core of the set it may use. A refusal only costs speed.
#[cfg(target_os = "linux")]
fn pin_to_core(index: usize) {
    // SAFETY: `cpu_set_t` is a plain bit set, valid as zeros; the calls read and write only the sets given to them, and
    // CPU_ISSET and CPU_SET get bits below CPU_SETSIZE.
    unsafe {
        let mut allowed: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut allowed) != 0 {
            return;
        }
        let mut cores = (0..libc::CPU_SETSIZE as usize).filter(|core| libc::CPU_ISSET(*core, &allowed));
        let Some(core) = cores.nth(index) else { return };
        let mut one: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut one);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &one);
    }
}

#[cfg(not(target_os = "linux"))]
fn pin_to_core(_index: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_thread_runs_once_a_launch() {
        for threads in [1, 2, 3, 5, 8] {
            for placement in [Placement::Free, Placement::Pinned] {
                let pool = Pool::new(threads, placement);
                assert_eq!(pool.threads(), threads);
                let calls: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
                for launch in 1..=300 {
                    pool.run(|index, count| {
                        assert_eq!(count, threads);
                        calls[index].fetch_add(1, Relaxed);
                    });
                    assert!(
                        calls.iter().all(|count| count.load(Relaxed) == launch),
                        "{threads} threads, launch {launch}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_small_launch_runs_on_the_first_threads_only() {
        let pool = Pool::new(4, Placement::Free);
        for round in 0..2000 {
            let limit = round % 6;
            let expected = limit.clamp(1, 4);
            let calls = AtomicU64::new(0);
            pool.run_on(limit, |index, count| {
                assert_eq!(count, expected);
                calls.fetch_add(1 << (8 * index), Relaxed);
            });
            assert_eq!(calls.load(Relaxed), 0x0101_0101u64 & ((1 << (8 * expected)) - 1));
        }
    }

    #[test]
    fn launches_after_a_pause_wake_the_parked_threads() {
        let pool = Pool::new(3, Placement::Free);
        let sum = AtomicUsize::new(0);
        for _ in 0..5 {
            while !pool.shared.parked.iter().all(|flag| flag.0.load(SeqCst)) {
                std::thread::yield_now();
            }
            pool.run(|index, _| {
                sum.fetch_add(index, Relaxed);
            });
        }
        assert_eq!(sum.load(Relaxed), 15);
    }

    #[test]
    fn a_panic_on_any_thread_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(3, Placement::Free);
        for failing in 0..3 {
            let caught = catch_unwind(AssertUnwindSafe(|| {
                pool.run(|index, _| {
                    if index == failing {
                        resume_unwind(Box::new("as planned"));
                    }
                });
            }));
            assert_eq!(caught.unwrap_err().downcast_ref::<&str>(), Some(&"as planned"), "thread {failing}");
            let calls = AtomicUsize::new(0);
            pool.run(|_, _| {
                calls.fetch_add(1, Relaxed);
            });
            assert_eq!(calls.load(Relaxed), 3);
        }
    }

    #[test]
    fn a_launch_inside_a_launch_is_refused() {
        let pool = Pool::new(2, Placement::Free);
        let caught = catch_unwind(AssertUnwindSafe(|| pool.run(|_, _| pool.run(|_, _| {}))));
        assert!(caught.is_err());
        let calls = AtomicUsize::new(0);
        pool.run(|_, _| {
            calls.fetch_add(1, Relaxed);
        });
        assert_eq!(calls.load(Relaxed), 2);
    }

    /// `cargo test -p tf-device --release -- --ignored --nocapture launch_cost`
    #[test]
    #[ignore = "prints times and checks nothing"]
    fn launch_cost() {
        for threads in [1, 2, 3, 4] {
            let pool = Pool::new(threads, Placement::Free);
            let start = std::time::Instant::now();
            let launches = 20000;
            for _ in 0..launches {
                pool.run(|index, _| {
                    std::hint::black_box(index);
                });
            }
            println!("{threads} threads: {:.2} us a launch", start.elapsed().as_secs_f64() * 1e6 / launches as f64);
        }
    }
}
