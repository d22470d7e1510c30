//! Runs one part of a layer on given rows, with the kernels and caches of the forward: for checks against recorded values.
//!
//! [`Parts::open`] gives a sequence's token ids; its rows are positions from 0 on. Each part then takes the rows
//! that the forward would have made itself. Nothing here is on the path of a reply.

use tf_device::{Buffer, LaunchError, Queue};
use tf_engine::model::{RoundPlan, SlotIndex, Window};
use tf_kernels::quantise;

use super::draft;
use super::fault::Fault;
use super::forward::{self, Round, Step, StepError};
use super::model::DeepseekV41;
use super::rows::RowSet;

/// A model whose parts run alone. The sequence is in slot 0, which must be empty before and is left as it was opened.
pub struct Parts<'a> {
    model: &'a mut DeepseekV41,
    rows: usize,
}

/// What the halves of a block make of given streams.
#[derive(Clone, Debug, PartialEq)]
pub struct MixedRows {
    pub attention_input: Vec<f32>,
    pub experts_input: Vec<f32>,
    pub streams: Vec<f32>,
    pub mix: Vec<f32>,
}

/// The first values of a buffer.
fn values(queue: &mut Queue, buffer: &Buffer, count: usize) -> Result<Vec<f32>, LaunchError> {
    let mut values = vec![0.0; count];
    queue.read(buffer, 0, &mut values)?;
    Ok(values)
}

impl<'a> Parts<'a> {
    /// # Errors
    /// [`StepError`] when the sequence doesn't fit a round, or slot 0 isn't empty.
    pub fn open(model: &'a mut DeepseekV41, ids: &[u32]) -> Result<Parts<'a>, StepError> {
        let window = Window {
            slot: SlotIndex(0),
            start: 0,
            rows: 0..ids.len(),
            prompt_end: ids.len() as u32,
            whole: true,
            draw: 0..ids.len(),
            logprobs: None,
            sequence: 0,
        };
        model.plan_rows(&RoundPlan { tokens: ids.to_vec(), windows: vec![window] })?;
        model.cache.check(&model.windows, &model.rows)?;
        model.cache.begin(&mut model.queue, &model.windows[0], ids, Fault::None)?;
        Ok(Parts { rows: ids.len(), model })
    }

    fn split(&mut self) -> (Step<'_>, Round<'_>, &super::load::Weights) {
        let model = &mut *self.model;
        let step =
            Step { shape: &model.shape, tables: &model.tables, queue: &mut model.queue, scratch: &mut model.scratch };
        let round = Round {
            rows: &model.rows,
            cache: &mut model.cache,
            entries: &mut model.entries,
            history: &mut model.history,
            ring_windows: &mut model.ring_windows,
            draft: None,
            fault: Fault::None,
        };
        (step, round, &model.weights)
    }

    /// Sets the input of a sublayer: the rows, and the same after QDQ8.
    fn input(&mut self, x: &[f32]) -> Result<(), StepError> {
        let (rows, columns) = (self.rows, self.model.shape.hidden_size);
        let scratch = &mut self.model.scratch;
        self.model.queue.write(&mut scratch.normed, 0, x)?;
        let args = quantise::Args { x: &scratch.normed, out: &mut scratch.quantised, rows, columns };
        Ok(quantise::launch(&mut self.model.queue, args)?)
    }

    /// The compressor and index keys of a source; fills its caches. Returns the latents.
    pub fn compress(&mut self, layer: usize, x: &[f32]) -> Result<Vec<f32>, StepError> {
        self.input(x)?;
        let (mut step, mut round, weights) = self.split();
        let frequencies = step.tables.frequencies(step.shape.ratio(layer));
        let set = round.rows.full();
        forward::compress(&mut step, &weights.layers[layer], &mut round, layer, set, frequencies)?;
        let count = round.entries.len() * step.shape.head_dim;
        Ok(values(step.queue, &step.scratch.latents, count)?)
    }

    /// The attention sublayer over its own window and the chosen entries, whose source was compressed before.
    pub fn attention(&mut self, layer: usize, x: &[f32], selections: &[Vec<u32>]) -> Result<Vec<f32>, StepError> {
        self.input(x)?;
        let width = self.model.shape.index_topk;
        let scratch = &mut self.model.scratch;
        for (row, selection) in selections.iter().enumerate() {
            self.model.queue.write(&mut scratch.selected, row * width, selection)?;
            self.model.queue.write(&mut scratch.selected_counts, row, &[selection.len() as u32])?;
        }
        let (mut step, mut round, weights) = self.split();
        let w = &weights.layers[layer];
        let frequencies = step.tables.frequencies(step.shape.ratio(layer));
        let set = round.rows.full();
        forward::project_keys_and_queries(&mut step, w, set, frequencies)?;
        forward::attend(&mut step, w, &mut round, layer, set, set, frequencies)?;
        forward::attention_output(&mut step, w, set.len())?;
        self.output()
    }

    /// The selection of an index source over its source's keys: for each row the chosen entries, ascending.
    pub fn select(&mut self, layer: usize, x: &[f32]) -> Result<Vec<Vec<u32>>, StepError> {
        self.input(x)?;
        let rows = self.rows;
        let (mut step, mut round, weights) = self.split();
        let w = &weights.layers[layer];
        let frequencies = step.tables.frequencies(step.shape.ratio(layer));
        let set = round.rows.full();
        forward::project_keys_and_queries(&mut step, w, set, frequencies)?;
        forward::select(&mut step, w, &mut round, layer, set, frequencies)?;
        let width = step.shape.index_topk;
        let (selected, counts) =
            (step.scratch.selected.to_vec::<u32>()?, step.scratch.selected_counts.to_vec::<u32>()?);
        Ok((0..rows).map(|row| selected[row * width..][..counts[row] as usize].to_vec()).collect())
    }

    /// The expert sublayer, and each row's experts.
    pub fn experts(&mut self, layer: usize, x: &[f32]) -> Result<(Vec<f32>, Vec<Vec<u32>>), StepError> {
        self.input(x)?;
        let rows = self.rows;
        let (mut step, _, weights) = self.split();
        let (count, picks) = (step.shape.n_routed_experts, step.shape.num_experts_per_tok);
        forward::route_and_run_experts(&mut step, &weights.layers[layer], rows, count, picks)?;
        let mut chosen = vec![0; rows * picks];
        step.queue.read(&step.scratch.chosen, 0, &mut chosen)?;
        Ok((self.output()?, chosen.chunks(picks).map(<[u32]>::to_vec).collect()))
    }

    /// Both halves of a block's hyper-connections around given sublayer outputs.
    pub fn mixes(
        &mut self,
        layer: usize,
        streams: &[f32],
        mix: &[f32],
        attention_output: &[f32],
        experts_output: &[f32],
    ) -> Result<MixedRows, StepError> {
        let rows = self.rows;
        let hidden = self.model.shape.hidden_size;
        let (mut step, _, weights) = self.split();
        let w = &weights.layers[layer];
        step.queue.write(&mut step.scratch.streams, 0, streams)?;
        step.queue.write(&mut step.scratch.mix, 0, mix)?;
        forward::enter_attention(&mut step, w, rows, false, true)?;
        let attention_input = values(step.queue, &step.scratch.normed, rows * hidden)?;
        step.queue.write(&mut step.scratch.y, 0, attention_output)?;
        forward::enter_experts(&mut step, w, rows)?;
        let experts_input = values(step.queue, &step.scratch.normed, rows * hidden)?;
        step.queue.write(&mut step.scratch.y, 0, experts_output)?;
        forward::expand(&mut step, rows)?;
        let (stream_width, mix_width) = (step.shape.stream_width(), step.shape.hc_mult);
        Ok(MixedRows {
            attention_input,
            experts_input,
            streams: values(step.queue, &step.scratch.streams, rows * stream_width)?,
            mix: values(step.queue, &step.scratch.mix, rows * mix_width)?,
        })
    }

    /// The streams after the n-gram memory of a layer.
    pub fn engram(&mut self, layer: usize, streams: &[f32]) -> Result<Vec<f32>, StepError> {
        let (mut step, mut round, weights) = self.split();
        step.queue.write(&mut step.scratch.streams, 0, streams)?;
        let index = step.shape.engram_index(layer).expect("the caller names an Engram layer");
        forward::engram(&mut step, weights, &mut round, layer, index)?;
        Ok(values(step.queue, &step.scratch.streams, streams.len())?)
    }

    /// Logits of rows after the final norm.
    pub fn head(&mut self, normed: &[f32]) -> Result<Vec<f32>, StepError> {
        let rows = self.rows;
        let mut logits = Vec::new();
        for first in (0..rows).step_by(self.model.logits_rows) {
            let batch: Vec<u32> = (first as u32..(first + self.model.logits_rows).min(rows) as u32).collect();
            let (mut step, _, weights) = self.split();
            step.queue.write(&mut step.scratch.normed, 0, normed)?;
            forward::head(&mut step, &weights.head, &batch)?;
            logits.extend(values(step.queue, &step.scratch.logits, batch.len() * step.shape.vocab_size)?);
        }
        Ok(logits)
    }

    /// Lets recorded taps of all rows enter the draft rings.
    pub fn ingest(&mut self, taps: &[f32]) -> Result<(), StepError> {
        let (rows, columns) = (self.rows, self.model.shape.tap_width());
        self.model.queue.write(&mut self.model.scratch.taps, 0, taps)?;
        let args = quantise::ArgsInPlace { values: &mut self.model.scratch.taps, rows, columns };
        quantise::launch_in_place(&mut self.model.queue, args)?;
        let model = &mut *self.model;
        let mut step =
            Step { shape: &model.shape, tables: &model.tables, queue: &mut model.queue, scratch: &mut model.scratch };
        let context = model.draft.as_mut().expect("the options load the draft head");
        Ok(draft::ingest(&mut step, &model.weights.draft, context, model.rows.full(), &mut model.cache)?)
    }

    /// The attention sublayer of a draft block that follows the sequence's rows.
    pub fn draft_attention(&mut self, block: usize, x: &[f32]) -> Result<Vec<f32>, StepError> {
        let start = self.rows as u32;
        self.rows = self.model.shape.dspark_block_size;
        self.input(x)?;
        let model = &mut *self.model;
        let mut step =
            Step { shape: &model.shape, tables: &model.tables, queue: &mut model.queue, scratch: &mut model.scratch };
        let mut set = RowSet::default();
        set.push(0, start..start + self.rows as u32);
        let w = &model.weights.draft.blocks[block];
        draft::block_attention(&mut step, w, &set, &model.cache, block)?;
        let output = self.output();
        self.rows = start as usize;
        output
    }

    /// The bytes of a source's compressed entries and index keys, as far as the first page.
    ///
    /// # Errors
    /// [`StepError`] when the device fails.
    pub fn cached(&mut self, layer: usize) -> Result<(Vec<u8>, Vec<u8>), StepError> {
        let model = &mut *self.model;
        let source = forward::source_index(&model.shape, layer);
        let layout = model.cache.layout();
        let page = model.cache.page_table[0] as usize;
        let size = |record: usize| layout.entries_per_page(source) as usize * record;
        let (mut entries, mut keys) =
            (vec![0; size(layout.compressed_record_bytes)], vec![0; size(layout.index_record_bytes)]);
        model.queue.read(&model.cache.compressed[source], page * entries.len(), &mut entries)?;
        model.queue.read(&model.cache.index_keys[source], page * keys.len(), &mut keys)?;
        Ok((entries, keys))
    }

    fn output(&mut self) -> Result<Vec<f32>, StepError> {
        let count = self.rows * self.model.shape.hidden_size;
        Ok(values(&mut self.model.queue, &self.model.scratch.y, count)?)
    }
}
