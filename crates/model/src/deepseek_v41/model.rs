//! The production model: owns weights, caches and activations, and runs what the engine plans.

use std::collections::BTreeSet;
use std::ops::Range;

use tf_device::{Device, LaunchError, Queue};
use tf_engine::model::{
    DecodeError, DraftRequest, Drafts, Drawn, ForwardError, Model, ModelLimits, PageCounts, RoundPlan, SequenceView,
    SlotIndex, Window,
};
use tf_engine::request::Position;
use tf_kernels::rows::{EntryInfo, WindowInfo};
use tf_numerics::lanes::Level;

use super::cache::{Cache, CacheLayout};
use super::draft::{self, Anchor};
use super::draw::{self, Draws, RowOf};
use super::engram::EngramHash;
use super::fault::Fault;
use super::forward::{self, History, LOOKBACK_MAX, Round, Step, StepError, Tables};
use super::load::Weights;
use super::pages::PAGE_POSITIONS;
use super::rows::{Depth, RoundRows, WindowRows};
use super::scratch::Scratch;
use super::shape::Shape;
use super::snapshot::{self, Snapshot};
use super::snapshot_file;

/// What a model is loaded for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Threads of the queue; the caller counts as one.
    pub threads: usize,
    pub level: Level,
    /// Positions of one sequence at most.
    pub context: u32,
    pub slots: u32,
    /// Rows of one round at most.
    pub round_rows: u32,
    /// Cache pages of 128 positions; by default twice what all slots can fill.
    pub pages: Option<u32>,
    /// Whether late layers skip the prompt rows that nothing reads. Changes no bit.
    pub halo: bool,
    /// Whether the draft head is loaded and fed. Changes no bit.
    pub draft: bool,
    /// A planted defect, for the tests of the tests.
    #[doc(hidden)]
    pub fault: Fault,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            threads: 1,
            level: Level::best(),
            context: 4096,
            slots: 8,
            round_rows: 512,
            pages: None,
            halo: true,
            draft: true,
            fault: Fault::None,
        }
    }
}

/// An option that this model cannot serve.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OptionError {
    #[error("context {context} is larger than this model's {max} positions; use a smaller value")]
    Context { context: u32, max: usize },
    #[error("{what} is 0; at least 1 is needed")]
    Zero { what: &'static str },
    #[error("round rows {round_rows} are fewer than one verify window of {window} rows; use a larger value")]
    RoundRows { round_rows: u32, window: usize },
    #[error("n-grams of {found} tokens are longer than the {max} that this build reads")]
    Lookback { found: usize, max: usize },
}

impl Options {
    /// Whether a model of this shape can serve these options.
    ///
    /// # Errors
    /// [`OptionError`] names the first that it cannot.
    pub fn check(&self, shape: &Shape) -> Result<(), OptionError> {
        for (what, value) in [("context", self.context), ("slots", self.slots), ("threads", self.threads as u32)] {
            if value == 0 {
                return Err(OptionError::Zero { what });
            }
        }
        if self.context as usize > shape.max_position_embeddings {
            return Err(OptionError::Context { context: self.context, max: shape.max_position_embeddings });
        }
        // Without drafts a window is one row.
        let window = if self.draft { shape.window_rows_max() } else { 1 };
        if (self.round_rows as usize) < window {
            return Err(OptionError::RoundRows { round_rows: self.round_rows, window });
        }
        if shape.engram_max_ngram_size > LOOKBACK_MAX {
            return Err(OptionError::Lookback { found: shape.engram_max_ngram_size, max: LOOKBACK_MAX });
        }
        Ok(())
    }
}

/// What a model has done since it was loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    pub rounds: u64,
    /// Rows of all rounds.
    pub rows: u64,
    /// Rows that shared their round with rows of another sequence.
    pub rows_shared: u64,
    /// Rows times layers that the halo left out.
    pub layer_rows_skipped: u64,
    /// Rows whose logits were computed.
    pub rows_with_logits: u64,
    pub draft_blocks: u64,
    pub snapshots: u64,
    pub restores: u64,
}

/// Logits are computed for this many rows at a time.
pub(super) const LOGITS_ROWS: usize = 64;

/// A loaded DeepSeek-V4.1 checkpoint with its caches.
#[derive(Debug)]
pub struct DeepseekV41 {
    pub(super) shape: Shape,
    pub(super) options: Options,
    pub(super) weights: Weights,
    pub(super) tables: Tables,
    pub(super) queue: Queue,
    pub(super) cache: Cache,
    pub(super) scratch: Scratch,
    pub(super) rows: RoundRows,
    pub(super) windows: Vec<WindowRows>,
    pub(super) entries: Vec<EntryInfo>,
    pub(super) history: History,
    pub(super) ring_windows: Vec<WindowInfo>,
    pub(super) draft: Option<draft::Context>,
    pub(super) draws: Draws,
    /// For each drawn row its row of `scratch.normed`, and which it is of which window.
    pub(super) drawn_rows: Vec<u32>,
    pub(super) row_of: Vec<RowOf>,
    pub(super) anchors: Vec<u32>,
    pub(super) logits_rows: usize,
    pub(super) counters: Counters,
    /// Why the device gave no snapshot or took none: no later round can be right.
    failure: Option<LaunchError>,
}

/// Why a model could not be made.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    #[error(transparent)]
    Options(#[from] OptionError),
    #[error(transparent)]
    Memory(#[from] tf_device::LaunchError),
}

impl DeepseekV41 {
    /// Reserves caches and activations around packed weights.
    ///
    /// # Errors
    /// [`BuildError`] when an option is out of range or the system refuses the memory.
    pub fn new(shape: Shape, weights: Weights, hash: EngramHash, options: Options) -> Result<DeepseekV41, BuildError> {
        options.check(&shape)?;
        let device = weights.device().clone();
        let rows = options.round_rows as usize;
        let slots = options.slots as usize;
        let logits_rows = rows.min(LOGITS_ROWS).max(shape.dspark_block_size);
        let layout = CacheLayout::new(&shape, options.slots, options.context, options.pages);
        let depth = Depth {
            layer_count: shape.num_hidden_layers,
            last_source: shape.kv_source_layer_ids.last().copied().unwrap_or(0),
            window: shape.sliding_window as u32,
        };
        let context = options.context as usize;
        let scratch = Scratch::new(&device, &shape, rows, logits_rows, context, options.threads)?;
        let draft = match options.draft {
            true => Some(draft::Context::new(&device, &shape, rows, logits_rows)?),
            false => None,
        };
        Ok(DeepseekV41 {
            queue: match &device {
                Device::Cpu(_) => Queue::cpu(options.threads, options.level),
                Device::Gpu(gpu) => Queue::gpu(gpu),
            },
            cache: Cache::new(&device, layout)?,
            scratch,
            rows: RoundRows::new(depth, rows, slots),
            windows: Vec::with_capacity(slots),
            entries: Vec::with_capacity(rows),
            history: History { ids: Vec::with_capacity(rows * shape.engram_columns()) },
            ring_windows: Vec::with_capacity(slots),
            draft,
            draws: Draws::new(),
            failure: None,
            drawn_rows: Vec::with_capacity(rows),
            row_of: Vec::with_capacity(rows),
            anchors: Vec::with_capacity(logits_rows),
            logits_rows,
            counters: Counters::default(),
            tables: Tables::new(&shape, hash),
            shape,
            options,
            weights,
        })
    }

    /// What a model was made from, for another one with other options.
    pub fn into_parts(self) -> (Shape, Weights, EngramHash) {
        (self.shape, self.weights, self.tables.hash)
    }

    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    pub fn options(&self) -> &Options {
        &self.options
    }

    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Keeps the names of the kernels that are launched from here on; see [`DeepseekV41::recorded_launches`].
    pub fn record_launches(&mut self) {
        self.queue.record_launches();
    }

    /// The kernels launched since [`DeepseekV41::record_launches`], by the names of the kernel registry.
    pub fn recorded_launches(&mut self) -> BTreeSet<&'static str> {
        self.queue.recorded_launches()
    }

    /// Sizes of the caches, for memory plans.
    pub fn cache_layout(&self) -> &CacheLayout {
        self.cache.layout()
    }

    /// Cache pages that neither a slot nor a snapshot holds.
    pub fn pages_free(&self) -> u32 {
        self.cache.pages_free()
    }

    /// Positions that a slot holds.
    pub fn length(&self, slot: SlotIndex) -> Position {
        self.cache.length(slot.0)
    }

    /// Computes the rows of `plan` and appends the raw logits of the drawn ones to `logits`, `vocab_size` a row. Draws
    /// nothing; the slots advance as by `forward`.
    ///
    /// # Errors
    /// [`ForwardError::Failed`] when a window doesn't continue its slot, a token is unknown or a page is missing.
    pub fn logits_rows(&mut self, plan: &RoundPlan, logits: &mut Vec<f32>) -> Result<(), ForwardError> {
        self.run(plan).map_err(failed)?;
        for first in (0..self.drawn_rows.len()).step_by(self.logits_rows) {
            let batch = first..(first + self.logits_rows).min(self.drawn_rows.len());
            self.head(batch.clone()).map_err(failed)?;
            let known = logits.len();
            logits.resize(known + batch.len() * self.shape.vocab_size, 0.0);
            let read = self.queue.read(&self.scratch.logits, 0, &mut logits[known..]);
            read.map_err(|error| failed(error.into()))?;
        }
        Ok(())
    }

    /// Runs all layers over the plan's rows; on return `drawn_rows` names the rows of `scratch.normed` to be drawn.
    pub(super) fn run(&mut self, plan: &RoundPlan) -> Result<(), StepError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone().into());
        }
        self.plan_rows(plan)?;
        self.cache.check(&self.windows, &self.rows)?;
        // What was written between rounds is none of this one.
        self.queue.submit()?;
        for (window, rows) in self.windows.iter().zip(&plan.windows) {
            self.cache.begin(&mut self.queue, window, &plan.tokens[rows.rows.clone()], self.options.fault)?;
        }
        let (shape, tables) = (&self.shape, &self.tables);
        let mut step = Step { shape, tables, queue: &mut self.queue, scratch: &mut self.scratch };
        let mut round = Round {
            rows: &self.rows,
            cache: &mut self.cache,
            entries: &mut self.entries,
            history: &mut self.history,
            ring_windows: &mut self.ring_windows,
            draft: self.draft.as_mut(),
            fault: self.options.fault,
        };
        forward::layers(&mut step, &self.weights, &mut round, &plan.tokens)?;
        let last = self.rows.set(self.rows.out(self.shape.num_hidden_layers - 1));
        forward::finish(&mut step, &self.weights.norm, last.len(), false)?;
        let tapped = self.shape.dspark_target_layer_ids.last().copied().unwrap_or(0);
        self.cache.commit(&self.rows, self.rows.set(self.rows.enter(tapped)));

        self.drawn_rows.clear();
        for (drawn, last) in self.rows.set(self.rows.drawn()).windows.iter().zip(&last.windows) {
            let first = last.first_row + (drawn.start - last.start);
            self.drawn_rows.extend(first..first + drawn.row_count);
        }
        let rows = plan.tokens.len() as u64;
        self.counters.rounds += 1;
        self.counters.rows += rows;
        self.counters.rows_shared += if plan.windows.len() > 1 { rows } else { 0 };
        self.counters.layer_rows_skipped += self.rows.skipped();
        self.counters.rows_with_logits += self.drawn_rows.len() as u64;
        Ok(())
    }

    pub(super) fn plan_rows(&mut self, plan: &RoundPlan) -> Result<(), StepError> {
        let rows_max = self.options.round_rows as usize;
        if plan.tokens.len() > rows_max {
            return Err(StepError::Rows { rows: plan.tokens.len(), max: rows_max });
        }
        let vocab_size = self.shape.vocab_size;
        if let Some(token) = plan.tokens.iter().copied().find(|token| *token as usize >= vocab_size) {
            return Err(StepError::Token { token, vocab_size });
        }
        self.windows.clear();
        let mut next = 0;
        for (index, window) in plan.windows.iter().enumerate() {
            let problem = match window {
                Window { rows, .. } if rows.start != next || rows.end <= rows.start || rows.end > plan.tokens.len() => {
                    Some("its rows are not the next ones of the round")
                }
                Window { rows, draw, .. } if draw.start > draw.end || draw.end > rows.len() => {
                    Some("it draws rows that it doesn't have")
                }
                _ => None,
            };
            if let Some(problem) = problem {
                return Err(StepError::Window { window: index, problem });
            }
            next = window.rows.end;
            self.windows.push(WindowRows {
                slot: window.slot.0,
                start: window.start,
                end: window.start + window.rows.len() as u32,
                prompt_end: window.prompt_end,
                whole: window.whole,
                draw: window.start + window.draw.start as u32..window.start + window.draw.end as u32,
            });
        }
        if next != plan.tokens.len() {
            return Err(StepError::Window { window: plan.windows.len(), problem: "rows are left that no window has" });
        }
        let short = u32::from(self.options.fault == Fault::HaloShort);
        self.rows.plan_with(&self.windows, self.options.halo, short);
        Ok(())
    }

    /// Logits of a batch of the drawn rows, in `scratch.logits`.
    fn head(&mut self, batch: Range<usize>) -> Result<(), StepError> {
        let (shape, tables) = (&self.shape, &self.tables);
        let mut step = Step { shape, tables, queue: &mut self.queue, scratch: &mut self.scratch };
        Ok(forward::head(&mut step, &self.weights.head, &self.drawn_rows[batch])?)
    }

    /// Sequences of one pass of the draft head.
    fn draft_batch(&self) -> usize {
        (self.logits_rows / self.shape.dspark_block_size).max(1)
    }

    /// Whether the draft rings hold every position that a block at `request.position` reads.
    fn can_draft(&self, request: &DraftRequest<'_>) -> bool {
        let needed = request.position.saturating_sub(self.shape.sliding_window as u32);
        self.cache.length(request.slot.0) == request.position
            && request.position > 0
            && self.cache.drafts_held_from(request.slot.0) <= needed
            && (request.anchor as usize) < self.shape.vocab_size
            && request.count_max > 0
    }

    fn draft_batch_of(&mut self, wanted: &[DraftRequest<'_>], drafts: &mut Drafts) -> Result<(), StepError> {
        let Some(context) = self.draft.as_mut() else {
            return Ok(());
        };
        self.queue.submit()?;
        let (shape, tables) = (&self.shape, &self.tables);
        let mut step = Step { shape, tables, queue: &mut self.queue, scratch: &mut self.scratch };
        let first = (self.options.fault == Fault::DraftSlot).then_some(wanted[0].slot.0);
        let anchors = wanted.iter().map(|request| Anchor {
            slot: first.unwrap_or(request.slot.0),
            token: request.anchor,
            position: request.position,
        });
        draft::blocks(&mut step, &self.weights, context, &self.cache, anchors)?;
        self.anchors.clear();
        self.anchors.extend(wanted.iter().map(|request| request.anchor));
        let longest = wanted.iter().map(|request| request.count_max as usize).max().unwrap_or(0);
        let steps = longest.min(self.shape.dspark_block_size);
        // The anchor stands at `position`, so the first proposal is for the position after it.
        let sampled = |sequence: usize| {
            let request = &wanted[sequence];
            draw::proposals(request.sampling, request.position + 1)
        };
        let draws = self.draws.scratch();
        draft::chain(&mut step, &self.weights.draft, context, &self.anchors, &sampled, steps, draws)?;
        for (sequence, request) in wanted.iter().enumerate() {
            let proposals = draft::proposals(sequence, steps, request.count_max as usize);
            let first = drafts.tokens.len();
            drafts.tokens.extend_from_slice(&context.tokens[proposals.clone()]);
            drafts.confidence.extend(context.confidence[proposals].iter().map(|raw| tf_numerics::math::sigmoid(*raw)));
            drafts.ranges.push(first..drafts.tokens.len());
        }
        self.counters.draft_blocks += wanted.len() as u64;
        Ok(())
    }
}

fn failed(error: StepError) -> ForwardError {
    match error {
        StepError::EngramRow(_) | StepError::EngramFile(_) => ForwardError::Unreadable(error.to_string()),
        other => ForwardError::Failed(other.to_string()),
    }
}

impl Model for DeepseekV41 {
    type Snapshot = Snapshot;

    fn limits(&self) -> ModelLimits {
        ModelLimits {
            vocab_size: self.shape.vocab_size as u32,
            context: self.options.context,
            slots: self.options.slots,
            round_rows: self.options.round_rows,
            draft_block: if self.draft.is_some() { self.shape.dspark_block_size as u32 } else { 0 },
        }
    }

    fn forward(
        &mut self,
        plan: &RoundPlan,
        sequences: &[SequenceView<'_>],
        drawn: &mut Drawn,
    ) -> Result<(), ForwardError> {
        drawn.clear();
        self.run(plan).map_err(failed)?;
        self.row_of.clear();
        for (index, window) in plan.windows.iter().enumerate() {
            let first = self.row_of.len();
            self.row_of.extend((0..window.draw.len()).map(|row| RowOf { window: index, row }));
            drawn.windows.push(first..self.row_of.len());
        }
        for first in (0..self.drawn_rows.len()).step_by(self.logits_rows) {
            let batch = first..(first + self.logits_rows).min(self.drawn_rows.len());
            self.head(batch.clone()).map_err(failed)?;
            let Self { draws, queue, scratch, shape, row_of, .. } = self;
            let rows = &row_of[batch];
            let drawn_batch = draws.rows(
                queue,
                &scratch.logits,
                shape.vocab_size,
                rows,
                plan,
                sequences,
                &mut drawn.rows,
                &mut drawn.top,
            );
            drawn_batch.map_err(|error| failed(error.into()))?;
        }
        self.queue.submit().map_err(|error| failed(error.into()))
    }

    fn keep(&mut self, slot: SlotIndex, length: Position) {
        self.cache.keep(slot.0, length);
    }

    fn draft(&mut self, wanted: &[DraftRequest<'_>], drafts: &mut Drafts) -> Result<(), ForwardError> {
        drafts.clear();
        if self.options.fault == Fault::DraftWrites {
            for request in wanted.iter().filter(|request| request.position > 0) {
                let record = self.cache.ring_record(request.slot.0, request.position - 1);
                let zeroed = self.queue.fill_zero(&mut self.cache.windows[0], record.start, record.len());
                zeroed.map_err(|error| failed(error.into()))?;
            }
        }
        let batch = self.draft_batch();
        let mut next = 0;
        while next < wanted.len() {
            if self.draft.is_none() || !self.can_draft(&wanted[next]) {
                drafts.ranges.push(drafts.tokens.len()..drafts.tokens.len());
                next += 1;
                continue;
            }
            let more = wanted[next..].iter().take(batch).take_while(|request| self.can_draft(request)).count();
            self.draft_batch_of(&wanted[next..next + more], drafts).map_err(failed)?;
            next += more;
        }
        Ok(())
    }

    fn snapshot(&mut self, slot: SlotIndex, position: Position) -> Snapshot {
        let behind = self.cache.length(slot.0).checked_sub(position);
        let reach = self.snapshot_reach();
        assert!(
            behind.is_some_and(|behind| behind <= reach),
            "a snapshot lies within {reach} positions of its slot's end"
        );
        self.counters.snapshots += 1;
        let tail = self.shape.engram_max_ngram_size - 1;
        let taken = snapshot::take(&self.cache, &mut self.queue, slot.0, position, tail, self.options.fault);
        taken.unwrap_or_else(|error| {
            self.failure = Some(error);
            Snapshot::lost(position, self.cache.layout())
        })
    }

    fn snapshot_reach(&self) -> u32 {
        self.cache.layout().snapshot_reach()
    }

    fn can_resume(&self, snapshot: &Snapshot, prompt_end: Position) -> bool {
        !self.options.halo || self.rows.depth().can_follow(snapshot.held_from(), snapshot.position(), prompt_end)
    }

    fn can_continue(&self, slot: SlotIndex, prompt_end: Position) -> bool {
        let (held, length) = (self.cache.held_from(slot.0), self.cache.length(slot.0));
        !self.options.halo || self.rows.depth().can_follow(held, length, prompt_end)
    }

    fn snapshot_bytes(&self, snapshot: &Snapshot) -> u64 {
        snapshot.bytes() as u64
    }

    fn snapshot_pages(&self, snapshot: &Snapshot, pages: &mut Vec<u32>) {
        pages.extend(snapshot.pages());
    }

    fn pages(&self) -> PageCounts {
        let layout = self.cache.layout();
        PageCounts {
            total: layout.page_count,
            free: self.cache.pages_free(),
            positions: PAGE_POSITIONS,
            bytes: layout.page_bytes() as u64,
        }
    }

    fn pages_needed(&self, slot: SlotIndex, end: Position) -> u32 {
        self.cache.pages_needed(slot.0, end)
    }

    fn encode(&mut self, snapshot: &Snapshot, bytes: &mut Vec<u8>) {
        snapshot_file::encode(snapshot, bytes);
    }

    fn read_pages(&mut self, snapshot: &Snapshot, pages: Range<u32>, bytes: &mut Vec<u8>) -> bool {
        let read = snapshot_file::read_pages(&self.cache, &mut self.queue, snapshot, pages, bytes);
        read.map_err(|error| self.failure = Some(error)).is_ok()
    }

    fn decode(&mut self, bytes: &[u8], base: Option<(&Snapshot, u32)>) -> Result<Snapshot, DecodeError> {
        snapshot_file::decode(&self.cache, self.shape.vocab_size, self.shape.engram_max_ngram_size - 1, bytes, base)
    }

    fn write_pages(&mut self, snapshot: &Snapshot, first: u32, bytes: &[u8]) -> bool {
        let written = snapshot_file::write_pages(&mut self.cache, &mut self.queue, snapshot, first, bytes);
        written.unwrap_or_else(|error| {
            self.failure = Some(error);
            false
        })
    }

    fn restore(&mut self, slot: SlotIndex, snapshot: &Snapshot) {
        self.counters.restores += 1;
        if let Err(error) = snapshot::restore(&mut self.cache, &mut self.queue, slot.0, snapshot) {
            self.failure = Some(error);
        }
    }

    fn release(&mut self, slot: SlotIndex) {
        self.cache.release(slot.0);
    }
}
