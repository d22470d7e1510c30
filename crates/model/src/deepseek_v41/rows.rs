//! Decides which rows of a round each layer computes (the exact halo of prompts). Pure: reads windows, writes lists.
//!
//! A layer after the last compressed source writes nothing but its own window of keys, so a prompt row far enough before
//! the prompt's end is never read there. With window `w` and last layer `n`, layer `l` needs keys on the last
//! `w + (n - l) * (w - 1)` positions of a prompt, and its output where layer `l + 1` needs keys; the last layer's output
//! is needed on drawn rows only. Skipping the others is exact because a row's bits depend on no other row's presence.
//!
//! A set of rows keeps, for every window of the round, one run of consecutive positions. Sets only shrink on the way
//! down, so a buffer follows from one set to the next by copying rows towards its start.

use std::ops::Range;

use tf_engine::request::Position;
use tf_kernels::rows::{RowInfo, WindowInfo};

/// What the halo depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Depth {
    pub layer_count: usize,
    /// The last layer that owns a compressed cache: from here on rows may be skipped.
    pub last_source: usize,
    /// Keys that a row sees in a window, its own included.
    pub window: u32,
}

impl Depth {
    /// The first position whose window key layer `layer` must have, so that every row from `boundary - 1` on is exact.
    pub fn keys_from(&self, layer: usize, boundary: Position) -> Position {
        let reach = u64::from(self.window) + (self.layer_count - 1 - layer) as u64 * u64::from(self.window - 1);
        u64::from(boundary).saturating_sub(reach) as Position
    }

    /// Whether windows with this `prompt_end` or a later one may follow `length` positions, given the first position
    /// from which each layer's window rows are there.
    pub fn can_follow(&self, held_from: &[Position], length: Position, prompt_end: Position) -> bool {
        (0..self.layer_count).all(|layer| {
            let first_out = match layer {
                _ if layer < self.last_source => 0,
                _ if layer + 1 < self.layer_count => self.keys_from(layer + 1, prompt_end),
                _ => prompt_end.saturating_sub(1),
            };
            let needed = first_out.max(length).saturating_sub(self.window - 1);
            needed >= length || held_from[layer] <= needed
        })
    }
}

/// One window of the round as the plan sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WindowRows {
    pub slot: u32,
    pub start: Position,
    pub end: Position,
    /// No position before `prompt_end - 1` is read by later rows except through windows.
    pub prompt_end: Position,
    pub whole: bool,
    /// Positions whose logits are wanted; within `[start, end]`.
    pub draw: Range<Position>,
}

impl WindowRows {
    fn boundary(&self) -> Position {
        if self.draw.is_empty() { self.prompt_end } else { self.prompt_end.min(self.draw.start + 1) }
    }
}

/// The rows that a stage of the forward computes, window by window, each a run of consecutive positions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowSet {
    pub rows: Vec<RowInfo>,
    /// One entry for every window of the round, also where no row is left; `start` is the run's first position.
    pub windows: Vec<WindowInfo>,
}

impl RowSet {
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    fn reserve(&mut self, rows: usize, windows: usize) {
        self.rows.reserve(rows);
        self.windows.reserve(windows);
    }

    fn clear(&mut self) {
        self.rows.clear();
        self.windows.clear();
    }

    /// Adds the run `[from, to)` of the next window.
    pub fn push(&mut self, slot: u32, run: Range<Position>) {
        let window = self.windows.len() as u32;
        let count = run.end.saturating_sub(run.start);
        let first_row = self.rows.len() as u32;
        self.windows.push(WindowInfo { slot, start: run.start, first_row, row_count: count });
        self.rows.extend(run.map(|position| RowInfo { slot, position, window }));
    }

    /// Calls `copy(from_row, to_row, count)` for every run that moves when a buffer shrinks from `self` to `to`, in an
    /// order that is safe within one buffer.
    pub fn moves(&self, to: &RowSet, mut copy: impl FnMut(usize, usize, usize)) {
        for (from, to) in self.windows.iter().zip(&to.windows) {
            if to.row_count == 0 {
                continue;
            }
            assert!(from.start <= to.start, "a row set may only shrink");
            assert!(to.start + to.row_count <= from.start + from.row_count, "a row set may only shrink");
            let source = (from.first_row + (to.start - from.start)) as usize;
            if source != to.first_row as usize {
                copy(source, to.first_row as usize, to.row_count as usize);
            }
        }
    }
}

/// The row sets of one round. Reused, so that a round allocates nothing.
#[derive(Clone, Debug)]
pub struct RoundRows {
    depth: Depth,
    sets: Vec<RowSet>,
    set_count: usize,
    /// For each layer, the set that enters it, the set whose window keys it makes and the set that leaves it.
    enter: Vec<usize>,
    keys: Vec<usize>,
    out: Vec<usize>,
    drawn: usize,
    skipped: u64,
    spare: RowSet,
}

impl RoundRows {
    /// Room for `rows_max` rows in `windows_max` windows.
    pub fn new(depth: Depth, rows_max: usize, windows_max: usize) -> Self {
        let late = depth.layer_count - depth.last_source;
        let mut spare = RowSet::default();
        spare.reserve(rows_max, windows_max);
        let sets = vec![spare.clone(); late + 3]
            .into_iter()
            .map(|mut set: RowSet| {
                set.reserve(rows_max, windows_max);
                set
            })
            .collect();
        let empty = vec![0; depth.layer_count];
        RoundRows {
            depth,
            sets,
            set_count: 0,
            enter: empty.clone(),
            keys: empty.clone(),
            out: empty,
            drawn: 0,
            skipped: 0,
            spare,
        }
    }

    pub fn depth(&self) -> &Depth {
        &self.depth
    }

    /// Plans the sets of a round. Without `halo` every layer computes every row.
    pub fn plan(&mut self, windows: &[WindowRows], halo: bool) {
        self.plan_with(windows, halo, 0);
    }

    /// As [`RoundRows::plan`]; a planted fault of the tests makes the halo `short` rows too small.
    pub fn plan_with(&mut self, windows: &[WindowRows], halo: bool, short: u32) {
        self.set_count = 0;
        let full = self.add(windows, |window| window.start..window.end);
        let last = self.depth.layer_count - 1;
        for layer in 0..=last {
            self.enter[layer] = if layer == 0 { full } else { self.out[layer - 1] };
            if !halo || layer < self.depth.last_source {
                self.keys[layer] = full;
                self.out[layer] = full;
                continue;
            }
            self.keys[layer] = match layer > self.depth.last_source {
                true => self.enter[layer],
                false => self.add_from(windows, layer, short),
            };
            self.out[layer] = match layer == last {
                true => self.add(windows, drawn_run),
                false => self.add_from(windows, layer + 1, short),
            };
        }
        self.drawn = self.add(windows, drawn_run);
        let full_rows = self.sets[full].len() as u64;
        let late = self.depth.last_source..last;
        self.skipped = late.map(|layer| full_rows - self.sets[self.out[layer]].len() as u64).sum();
    }

    /// The set of the positions whose window keys `layer` needs.
    fn add_from(&mut self, windows: &[WindowRows], layer: usize, short: u32) -> usize {
        let depth = self.depth;
        self.add(windows, |window| {
            let from = if window.whole { 0 } else { depth.keys_from(layer, window.boundary()) };
            let from = if from > 0 { from + short } else { from };
            from.clamp(window.start, window.end)..window.end
        })
    }

    /// The index of a set with these runs: the newest one when it is the same, else a new one.
    fn add(&mut self, windows: &[WindowRows], run: impl Fn(&WindowRows) -> Range<Position>) -> usize {
        self.spare.clear();
        for window in windows {
            self.spare.push(window.slot, run(window));
        }
        if self.set_count > 0 && self.sets[self.set_count - 1].windows == self.spare.windows {
            return self.set_count - 1;
        }
        std::mem::swap(&mut self.sets[self.set_count], &mut self.spare);
        self.set_count += 1;
        self.set_count - 1
    }

    /// All rows of the round.
    pub fn full(&self) -> &RowSet {
        &self.sets[0]
    }

    pub fn set(&self, index: usize) -> &RowSet {
        &self.sets[index]
    }

    /// Index of the set that enters `layer`.
    pub fn enter(&self, layer: usize) -> usize {
        self.enter[layer]
    }

    /// Index of the set on which `layer` makes window keys.
    pub fn keys(&self, layer: usize) -> usize {
        self.keys[layer]
    }

    /// Index of the set whose streams leave `layer`.
    pub fn out(&self, layer: usize) -> usize {
        self.out[layer]
    }

    /// Index of the set of drawn rows.
    pub fn drawn(&self) -> usize {
        self.drawn
    }

    /// Rows that layers before the last one didn't compute, summed over the layers.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }
}

fn drawn_run(window: &WindowRows) -> Range<Position> {
    if window.draw.is_empty() { window.end..window.end } else { window.draw.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RELEASE: Depth = Depth { layer_count: 40, last_source: 20, window: 128 };
    const SMALL: Depth = Depth { layer_count: 5, last_source: 2, window: 4 };

    fn prompt(start: Position, end: Position, prompt_end: Position, draw: Range<Position>) -> WindowRows {
        WindowRows { slot: 0, start, end, prompt_end, whole: false, draw }
    }

    fn planned(depth: Depth, windows: &[WindowRows], halo: bool) -> RoundRows {
        let rows = windows.iter().map(|window| (window.end - window.start) as usize).sum();
        let mut plan = RoundRows::new(depth, rows, windows.len());
        plan.plan(windows, halo);
        plan
    }

    #[test]
    fn the_release_needs_2414_rows_of_layer_20_down_to_128_of_layer_38() {
        let plan = planned(RELEASE, &[prompt(0, 5000, 5000, 4999..5000)], true);
        let out = |layer| plan.set(plan.out(layer)).len();
        assert_eq!((0..20).map(out).collect::<Vec<_>>(), vec![5000; 20]);
        assert_eq!(out(20), 2414);
        assert_eq!(out(38), 128);
        assert_eq!(out(39), 1);
        assert_eq!(plan.set(plan.enter(20)).len(), 5000, "the compressed rows of the last source need every row");
        assert_eq!(plan.set(plan.keys(20)).len(), 2414 + 127);
        for layer in 21..40 {
            assert_eq!(plan.keys(layer), plan.out(layer - 1));
        }
    }

    /// Marks what is read, walking back from every position that later rows can ask for.
    fn needed(depth: Depth, length: Position, from: Position) -> Vec<Vec<bool>> {
        let last = depth.layer_count - 1;
        let mut out = vec![vec![false; length as usize]; depth.layer_count];
        for position in from..length {
            for layer in 0..=last {
                out[layer][position as usize] = true;
            }
        }
        for layer in (1..=last).rev() {
            for position in 0..length as usize {
                if out[layer][position] {
                    for key in position.saturating_sub(depth.window as usize - 1)..=position {
                        out[layer - 1][key] = true;
                    }
                }
            }
        }
        out
    }

    #[test]
    fn skips_exactly_the_rows_that_nothing_reads() {
        for length in 1..40 {
            let plan = planned(SMALL, &[prompt(0, length, length, length - 1..length)], true);
            let needed = needed(SMALL, length, length - 1);
            for layer in SMALL.last_source..SMALL.layer_count {
                let set = plan.set(plan.out(layer));
                let kept: Vec<usize> = set.rows.iter().map(|row| row.position as usize).collect();
                let wanted: Vec<usize> = (0..length as usize).filter(|&p| needed[layer][p]).collect();
                assert_eq!(kept, wanted, "length {length}, layer {layer}");
            }
        }
    }

    #[test]
    fn pieces_of_a_prompt_skip_the_same_rows_as_the_whole() {
        for length in 1..40 {
            let whole = planned(SMALL, &[prompt(0, length, length, length - 1..length)], true);
            for cut in 1..length {
                let first = planned(SMALL, &[prompt(0, cut, length, 0..0)], true);
                let second = planned(SMALL, &[prompt(cut, length, length, length - 1..length)], true);
                for layer in 0..SMALL.layer_count {
                    let rows = |plan: &RoundRows| plan.set(plan.out(layer)).len();
                    assert_eq!(rows(&first) + rows(&second), rows(&whole), "length {length}, cut {cut}, layer {layer}");
                }
            }
        }
    }

    #[test]
    fn reply_rows_whole_windows_and_no_halo_skip_nothing() {
        let cases: [(WindowRows, bool); 4] = [
            (prompt(30, 36, 30, 30..36), true),
            (WindowRows { whole: true, ..prompt(0, 36, 36, 0..36) }, true),
            (prompt(0, 36, 36, 35..36), false),
            (prompt(0, 36, 36, 0..36), true), // rows before the prompt's end are drawn
        ];
        for (window, halo) in cases {
            let plan = planned(SMALL, std::slice::from_ref(&window), halo);
            for layer in 0..SMALL.layer_count - 1 {
                assert_eq!(plan.out(layer), 0, "{window:?}, layer {layer}");
            }
            assert_eq!(plan.skipped(), 0);
            let drawn: Vec<Position> = plan.set(plan.drawn()).rows.iter().map(|row| row.position).collect();
            assert_eq!(drawn, window.draw.collect::<Vec<_>>());
        }
    }

    #[test]
    fn company_does_not_change_a_windows_rows() {
        let windows = [
            prompt(0, 30, 30, 29..30),
            WindowRows { slot: 3, ..prompt(17, 20, 17, 17..20) },
            WindowRows { slot: 5, ..prompt(8, 20, 60, 0..0) },
        ];
        let together = planned(SMALL, &windows, true);
        for (index, window) in windows.iter().enumerate() {
            let alone = planned(SMALL, std::slice::from_ref(window), true);
            for layer in 0..SMALL.layer_count {
                for (name, set, solo) in
                    [("keys", together.keys(layer), alone.keys(layer)), ("out", together.out(layer), alone.out(layer))]
                {
                    let positions = |set: &RowSet, window: u32| -> Vec<Position> {
                        set.rows.iter().filter(|row| row.window == window).map(|row| row.position).collect()
                    };
                    let (found, wanted) = (positions(together.set(set), index as u32), positions(alone.set(solo), 0));
                    assert_eq!(found, wanted, "window {index}, layer {layer}, {name}");
                }
            }
        }
    }

    #[test]
    fn buffers_follow_by_moving_rows_towards_the_start() {
        let windows = [prompt(0, 30, 30, 29..30), prompt(17, 20, 17, 17..20), prompt(0, 5, 90, 0..0)];
        let plan = planned(SMALL, &windows, true);
        let mut values: Vec<u32> = plan.full().rows.iter().map(|row| row.position * 10 + row.window).collect();
        for (from, to) in (1..plan.set_count).map(|index| (plan.set(index - 1), plan.set(index))) {
            from.moves(to, |source, target, count| values.copy_within(source..source + count, target));
            let wanted: Vec<u32> = to.rows.iter().map(|row| row.position * 10 + row.window).collect();
            assert_eq!(&values[..to.len()], &wanted[..]);
        }
    }
}
