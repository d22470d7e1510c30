//! The engine's thread and the handle to it.
//!
//! One thread owns the state and the model. Commands are read between rounds, so a round never sees half a change.
//! Whoever holds a request holds its ending: dropping a reply cancels it, a lost thread ends it.

use std::future::poll_fn;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::channel::{self, Batch, Receiver};
use crate::clock::{Clock, Time};
use crate::commit;
use crate::disk::{Disk, Files, Folder, News, Shelf};
use crate::limits::{EngineLimits, LimitsError};
use crate::model::{Model, ModelLimits};
use crate::prefix_cache::PrefixCache;
use crate::prefixes::{self, release};
use crate::request::{FinishReason, Request, RequestId, StopReason, SubmitError};
use crate::round::{Busy, Scratch, run_round};
use crate::state::{State, Waiting};
use crate::stats::EngineStats;

/// What is asked of the engine's thread.
enum Command {
    Submit(Box<Waiting>),
    Cancel(RequestId),
    /// Takes nothing new, finishes what is there, then ends the thread.
    Drain,
    /// Ends everything at once, then the thread.
    Stop,
    /// The disk's worker says something.
    Disk(News),
}

/// How far the engine's life has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lifecycle {
    Running,
    Draining,
    /// The thread has ended, with the reason.
    Stopped(StopReason),
}

/// Where every running sequence waits for the disk, deadlines are looked at this often.
const DISK_WAIT: Duration = Duration::from_millis(20);

struct Shared {
    limits: EngineLimits,
    model: ModelLimits,
    clock: Arc<dyn Clock>,
    next_id: AtomicU64,
    /// Requests that have a slot, a place in the queue, or are on their way to one.
    present: AtomicU32,
    stats: Mutex<EngineStats>,
    lifecycle: Mutex<Lifecycle>,
}

impl Shared {
    fn set_lifecycle(&self, lifecycle: Lifecycle) {
        let mut current = self.lifecycle.lock().unwrap_or_else(PoisonError::into_inner);
        if !matches!(*current, Lifecycle::Stopped(_)) {
            *current = lifecycle;
        }
    }
}

/// A request's place in the engine; given back when the reply is dropped or has ended.
struct Place(Arc<Shared>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.present.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Submits requests to an engine. Cheap to clone.
#[derive(Clone)]
pub struct EngineHandle {
    commands: Arc<mpsc::Sender<Command>>,
    shared: Arc<Shared>,
}

impl EngineHandle {
    pub fn limits(&self) -> EngineLimits {
        self.shared.limits
    }

    pub fn model_limits(&self) -> ModelLimits {
        self.shared.model
    }

    pub fn now(&self) -> Time {
        self.shared.clock.now()
    }

    /// The counters as they were after the last round or command.
    pub fn stats(&self) -> EngineStats {
        *self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn lifecycle(&self) -> Lifecycle {
        self.shared.lifecycle.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Submits one request.
    ///
    /// # Errors
    /// See [`SubmitError`]; nothing was computed then.
    pub fn submit(&self, request: Request) -> Result<Reply, SubmitError> {
        let mut replies = self.submit_all(vec![request])?;
        Ok(replies.remove(0))
    }

    /// Submits requests that belong together: all are taken, in this order, or none.
    ///
    /// # Errors
    /// See [`SubmitError`]; the first that applies.
    pub fn submit_all(&self, requests: Vec<Request>) -> Result<Vec<Reply>, SubmitError> {
        requests.iter().try_for_each(|request| self.check(request))?;
        match self.lifecycle() {
            Lifecycle::Running => {}
            Lifecycle::Draining => return Err(SubmitError::Draining),
            Lifecycle::Stopped(reason) => return Err(SubmitError::Stopped(reason)),
        }
        let places = self.reserve(requests.len() as u32)?;
        let submitted = self.now();
        let mut replies = Vec::with_capacity(requests.len());
        for (request, place) in requests.into_iter().zip(places) {
            let id = RequestId(self.shared.next_id.fetch_add(1, Ordering::Relaxed));
            let limits = &self.shared.limits;
            let (sender, receiver) = channel::channel(limits.unread_tokens, limits.unread_time);
            let waiting = Waiting { id, request, sender, submitted };
            if self.commands.send(Command::Submit(Box::new(waiting))).is_err() {
                return Err(SubmitError::Stopped(StopReason::BrokenDown));
            }
            replies.push(Reply { id, receiver, commands: self.commands.clone(), place: Some(place) });
        }
        Ok(replies)
    }

    /// Whether `request` could ever be served.
    ///
    /// # Errors
    /// The request's own mistakes of [`SubmitError`].
    pub fn check(&self, request: &Request) -> Result<(), SubmitError> {
        let (prompt, max_tokens) = (request.prompt.len(), request.max_tokens);
        let (context, vocab_size) = (self.shared.limits.context, self.shared.model.vocab_size);
        if prompt == 0 {
            return Err(SubmitError::EmptyPrompt);
        }
        if prompt as u64 + u64::from(max_tokens) > u64::from(context) {
            return Err(SubmitError::TooLong { prompt, max_tokens, context });
        }
        let bias = request.sampling.logit_bias.iter().map(|&(token, _)| token);
        let given = request.forcing.iter().flat_map(|forcing| forcing.tokens());
        match request.prompt.iter().copied().chain(bias).chain(given).find(|&token| token >= vocab_size) {
            Some(token) => Err(SubmitError::UnknownToken { token, vocab_size }),
            None => Ok(()),
        }
    }

    fn reserve(&self, count: u32) -> Result<Vec<Place>, SubmitError> {
        // Requests that belong together come in through one free place: a large body is never refused for its size alone.
        let limits = &self.shared.limits;
        let present_max = limits.slots.saturating_add(limits.queue);
        let reserved = self.shared.present.fetch_update(Ordering::AcqRel, Ordering::Acquire, |present| {
            if present < present_max { present.checked_add(count) } else { None }
        });
        match reserved {
            Ok(_) => Ok((0..count).map(|_| Place(self.shared.clone())).collect()),
            Err(present) => Err(SubmitError::QueueFull {
                waiting: present.saturating_sub(limits.slots),
                retry_after: self.stats().ending_interval.clamp(Duration::from_secs(1), Duration::from_secs(60)),
            }),
        }
    }

    /// Takes nothing new; what is there is finished, then the thread ends.
    pub fn drain(&self) {
        self.shared.set_lifecycle(Lifecycle::Draining);
        // A thread that has ended already is drained.
        let _ = self.commands.send(Command::Drain);
    }

    /// Ends every request at once, then the thread.
    pub fn stop(&self) {
        self.shared.set_lifecycle(Lifecycle::Draining);
        let _ = self.commands.send(Command::Stop);
    }
}

/// The way to one reply. Dropping it cancels the request.
pub struct Reply {
    id: RequestId,
    receiver: Receiver,
    commands: Arc<mpsc::Sender<Command>>,
    place: Option<Place>,
}

impl Reply {
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// This request's place in the queue, counted from 1; 0 once it has a slot.
    pub fn queue_position(&self) -> u32 {
        self.receiver.queue_position()
    }

    /// Waits for something to happen and puts all of it into `batch`. Not to be called after the ending.
    pub async fn receive(&mut self, batch: &mut Batch) {
        poll_fn(|context| self.poll_receive(context, batch)).await;
    }

    /// The same as a poll, for whoever waits for several replies. `batch` is emptied.
    pub fn poll_receive(&mut self, context: &mut Context<'_>, batch: &mut Batch) -> Poll<()> {
        let poll = self.receiver.poll_receive(context, batch);
        self.note_ending(batch);
        poll
    }

    /// The same for a thread that may wait.
    pub fn receive_blocking(&mut self, batch: &mut Batch) {
        self.receiver.receive_blocking(batch);
        self.note_ending(batch);
    }

    /// What has happened so far, without waiting; false when nothing has.
    pub fn try_receive(&mut self, batch: &mut Batch) -> bool {
        let received = self.receiver.try_receive(batch);
        self.note_ending(batch);
        received
    }

    /// Asks for the end. It comes as any other ending does; tokens committed in the meantime may come before it.
    pub fn cancel(&self) {
        // A thread that has ended has ended this request too.
        let _ = self.commands.send(Command::Cancel(self.id));
    }

    fn note_ending(&mut self, batch: &Batch) {
        if batch.finished.is_some() {
            self.place = None;
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if self.place.is_some() {
            self.cancel();
        }
    }
}

/// The engine before it runs.
pub struct Engine<M: Model> {
    state: State,
    model: M,
    scratch: Scratch,
    cache: PrefixCache<M::Snapshot>,
    commands: mpsc::Receiver<Command>,
    shared: Arc<Shared>,
    is_draining: bool,
}

impl<M: Model> Engine<M> {
    /// Puts an engine around `model`.
    ///
    /// # Errors
    /// [`LimitsError`] with every limit that the model can't serve.
    pub fn new(model: M, limits: EngineLimits, clock: Arc<dyn Clock>) -> Result<(Self, EngineHandle), LimitsError> {
        let model_limits = model.limits();
        let limits = limits.checked(&model_limits)?;
        let mut state = State::new(limits, &model_limits);
        state.keeping = prefixes::rules_for(&model, &limits);
        let cache = prefixes::cache_for(&model, &limits);
        let (sender, commands) = mpsc::channel();
        let shared = Arc::new(Shared {
            limits,
            model: model_limits,
            clock,
            next_id: AtomicU64::new(0),
            present: AtomicU32::new(0),
            stats: Mutex::new(state.stats),
            lifecycle: Mutex::new(Lifecycle::Running),
        });
        let handle = EngineHandle { commands: Arc::new(sender), shared: shared.clone() };
        let engine = Engine { state, model, scratch: Scratch::default(), cache, commands, shared, is_draining: false };
        Ok((engine, handle))
    }

    /// Keeps prefixes in the files of `disk` too, with two threads of their own. Without kept prefixes it stays closed.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn use_disk<F: Files + 'static>(&mut self, disk: Disk<F>, handle: &EngineHandle) -> std::io::Result<()> {
        if !self.state.keeping.is_on {
            return Ok(());
        }
        // Handles alone keep the engine running, so the worker's way to it must not.
        let commands = Arc::downgrade(&handle.commands);
        let sink = Arc::new(move |news| {
            if let Some(commands) = commands.upgrade() {
                // A thread that has ended wants no news.
                let _ = commands.send(Command::Disk(news));
            }
        });
        let (shelf, [writer, reader]) = Shelf::new(disk, sink);
        std::thread::Builder::new().name("disk-write".to_string()).spawn(move || writer.run())?;
        std::thread::Builder::new().name("disk-read".to_string()).spawn(move || reader.run())?;
        self.state.stats.disk = shelf.stats();
        self.cache.shelf = Some(shelf);
        self.publish(None);
        Ok(())
    }

    /// Serves until it is drained or stopped, every handle is gone, or the device is lost.
    pub fn run(mut self) {
        // Also on a panic: handles must not wait for a thread that is gone. The senders in `state` end their requests.
        let mut ended = EndedGuard { shared: self.shared.clone(), reason: StopReason::BrokenDown };
        ended.reason = self.serve();
    }

    fn serve(&mut self) -> StopReason {
        let clock = self.shared.clock.clone();
        loop {
            if !self.read_commands(&*clock) {
                commit::end_all(&mut self.state, &FinishReason::Stopped, clock.now());
                release(&mut self.state, &mut self.model, &mut self.cache);
                self.publish(None);
                return StopReason::Asked;
            }
            if self.is_draining && self.state.is_idle() {
                return self.write_rest(&*clock);
            }
            self.publish(Some(clock.now()).filter(|_| !self.state.is_idle()));
            match run_round(&mut self.state, &mut self.model, &*clock, &mut self.scratch, &mut self.cache) {
                Ok(Busy::Worked) => self.state.stats.last_round = Some(clock.now()),
                Ok(Busy::Idle) => {}
                Err(lost) => {
                    self.publish(None);
                    return StopReason::DeviceLost(lost.0);
                }
            }
            self.publish(None);
        }
    }

    /// Puts on disk what isn't there yet. Whoever can't wait for it says stop.
    fn write_rest(&mut self, clock: &dyn Clock) -> StopReason {
        let mut is_closing = false;
        while let Some(shelf) = self.cache.shelf.as_mut().filter(|shelf| !shelf.is_closed()) {
            if !is_closing && !shelf.is_writing() {
                shelf.close();
                is_closing = true;
            }
            self.cache.write_behind(&mut self.model, u32::MAX);
            release(&mut self.state, &mut self.model, &mut self.cache);
            self.publish(None);
            if self.cache.shelf.as_ref().is_none_or(Shelf::is_closed) {
                break;
            }
            // The worker says when it has room and when it is done.
            match self.commands.recv() {
                Ok(Command::Submit(waiting)) => {
                    commit::enqueue(&mut self.state, *waiting);
                    commit::end_all(&mut self.state, &FinishReason::Stopped, clock.now());
                }
                Ok(command) => {
                    if !self.obey(command, clock) {
                        return StopReason::Asked;
                    }
                }
                Err(mpsc::RecvError) => return StopReason::Drained,
            }
        }
        StopReason::Drained
    }

    /// Reads all commands there are; waits for one when there is nothing else to do. False when all shall end.
    fn read_commands(&mut self, clock: &dyn Clock) -> bool {
        let is_idle = self.state.is_idle();
        if is_idle {
            self.cache.write_behind(&mut self.model, u32::MAX);
        }
        let first = match is_idle {
            true if self.is_draining => None,
            true => match self.commands.recv() {
                Ok(command) => Some(command),
                Err(mpsc::RecvError) => return false,
            },
            // Nothing can run before something is read from disk; its failing to come ends the wait too.
            false if self.state.is_waiting_for_disk() => self.commands.recv_timeout(DISK_WAIT).ok(),
            false => None,
        };
        if let Some(command) = first
            && !self.obey(command, clock)
        {
            return false;
        }
        while let Ok(command) = self.commands.try_recv() {
            if !self.obey(command, clock) {
                return false;
            }
        }
        true
    }

    fn obey(&mut self, command: Command, clock: &dyn Clock) -> bool {
        match command {
            Command::Submit(waiting) => commit::enqueue(&mut self.state, *waiting),
            Command::Cancel(id) => {
                commit::cancel(&mut self.state, id, clock.now());
                release(&mut self.state, &mut self.model, &mut self.cache);
            }
            Command::Drain => self.is_draining = true,
            Command::Stop => return false,
            Command::Disk(news) => {
                prefixes::hear(&self.state, &mut self.model, &mut self.cache, news, clock.now());
                self.state.stats.disk = self.cache.shelf.as_ref().map(Shelf::stats).unwrap_or_default();
            }
        }
        true
    }

    fn publish(&mut self, round_since: Option<Time>) {
        self.state.stats.round_since = round_since;
        *self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner) = self.state.stats;
    }
}

struct EndedGuard {
    shared: Arc<Shared>,
    reason: StopReason,
}

impl Drop for EndedGuard {
    fn drop(&mut self) {
        self.shared.set_lifecycle(Lifecycle::Stopped(self.reason.clone()));
    }
}

/// Runs an engine around `model` on a thread of its own.
///
/// # Errors
/// [`LimitsError`] with every limit that the model can't serve.
pub fn spawn<M: Model + Send + 'static>(
    model: M,
    limits: EngineLimits,
    clock: Arc<dyn Clock>,
) -> Result<(EngineHandle, JoinHandle<()>), LimitsError> {
    spawn_with_disk(model, limits, clock, None::<Disk<Folder>>)
}

/// The same with a disk tier for its kept prefixes.
///
/// # Errors
/// [`LimitsError`] with every limit that the model can't serve.
pub fn spawn_with_disk<M: Model + Send + 'static, F: Files + 'static>(
    model: M,
    limits: EngineLimits,
    clock: Arc<dyn Clock>,
    disk: Option<Disk<F>>,
) -> Result<(EngineHandle, JoinHandle<()>), LimitsError> {
    let (mut engine, handle) = Engine::new(model, limits, clock)?;
    let no_thread =
        |error: std::io::Error| LimitsError { mistakes: vec![format!("no thread could be started: {error}")] };
    if let Some(disk) = disk {
        engine.use_disk(disk, &handle).map_err(no_thread)?;
    }
    let thread = std::thread::Builder::new().name("engine".to_string()).spawn(move || engine.run());
    Ok((handle, thread.map_err(no_thread)?))
}
