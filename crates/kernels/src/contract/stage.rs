//! The memory and the queue of one checked launch: guards around everything, known content in everything that the kernel
//! must not read, and the outputs of each row gathered as words.

use super::Tamper;
use std::ops::Range;
use std::time::{Duration, Instant};
use tf_device::gpu::Backend;
use tf_device::{Buffer, Device, Element, Queue};

/// What lies in outputs, scratch and padding before a launch, and around every buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fill {
    /// As float32: a NaN, a large number or zero.
    pub word: u32,
    pub guard: u8,
}

impl Fill {
    /// A NaN with a payload.
    pub const NAN: Fill = Fill { word: 0x7fc0_dead, guard: 0xa5 };
    /// A large finite number.
    pub const LARGE: Fill = Fill { word: 0x4e6b_5a7e, guard: 0x7f };
    pub const ZERO: Fill = Fill { word: 0, guard: 0 };
}

/// An element that the stage can poison and compare.
pub trait Word: Element + Default {
    fn word(self) -> u32;
    fn of_fill(fill: Fill) -> Self;
}

impl Word for f32 {
    fn word(self) -> u32 {
        self.to_bits()
    }
    fn of_fill(fill: Fill) -> f32 {
        f32::from_bits(fill.word)
    }
}

macro_rules! words {
    ($($element:ty),*) => { $(
        impl Word for $element {
            fn word(self) -> u32 {
                u32::from(self)
            }
            fn of_fill(fill: Fill) -> $element {
                fill.word as $element
            }
        }
    )* };
}
words!(u8, u16, u32);

/// Elements of padding behind the rows of a buffer that may hold more.
const SLACK: usize = 96;

/// A buffer that the launch may only read.
pub struct Input {
    name: &'static str,
    pub buffer: Buffer,
    before: Vec<u8>,
}

/// A buffer that the launch writes, and what it held.
pub struct Output {
    name: &'static str,
    pub buffer: Buffer,
    before: Vec<u8>,
}

impl Input {
    /// What it held before the launch, as the host sees it.
    pub fn held(&self) -> &[u8] {
        self.buffer.host().unwrap_or(&self.before)
    }
}

impl Output {
    /// What it holds now.
    pub fn held<T: Word>(&self) -> Vec<T> {
        self.buffer.to_vec().expect("what a launch left can be read")
    }

    /// Changes what it holds: how a defect is planted behind a launch.
    pub fn edit<T: Word>(&mut self, change: impl FnOnce(&mut [T])) {
        let mut held = self.held::<T>();
        change(&mut held);
        self.buffer.write(0, &held).expect("a device takes what it gave");
    }
}

/// What a launch left.
pub struct Outcome {
    /// Each pick's output words.
    pub rows: Vec<Vec<u32>>,
    /// What was written that is nobody's.
    pub problems: Vec<String>,
    pub elapsed: Duration,
}

/// See the module's text.
pub struct Stage<'q> {
    queue: &'q mut Queue,
    /// Time inside the launcher.
    elapsed: Duration,
    fill: Fill,
    tamper: Option<Tamper>,
    earlier_launches: usize,
    threads: usize,
    rows: Vec<Vec<u32>>,
    problems: Vec<String>,
}

impl<'q> Stage<'q> {
    /// A stage for a launch of `pick_count` rows on a queue that has run `earlier_launches` before. `threads`: the number of
    /// the launch's geometry, on the CPU its threads.
    pub fn new(
        queue: &'q mut Queue,
        pick_count: usize,
        fill: Fill,
        tamper: Option<Tamper>,
        earlier_launches: usize,
        threads: usize,
    ) -> Stage<'q> {
        let rows = vec![Vec::new(); pick_count];
        Stage { queue, elapsed: Duration::ZERO, fill, tamper, earlier_launches, threads, rows, problems: Vec::new() }
    }

    /// Launches; only this is timed.
    ///
    /// # Errors
    /// The launcher's refusal.
    pub fn run<E: std::fmt::Display>(
        &mut self,
        launch: impl FnOnce(&mut Queue) -> Result<(), E>,
    ) -> Result<(), String> {
        let started = Instant::now();
        let result = launch(self.queue);
        self.elapsed += started.elapsed();
        result.map_err(|error| format!("refused: {error}"))
    }

    /// Where its buffers are, and where weights are to be packed.
    pub fn device(&self) -> Device {
        self.queue.device()
    }

    /// Threads of the queue, or the number of the geometry.
    pub fn threads(&self) -> usize {
        self.threads
    }

    fn buffer<T: Word>(&self, values: &[T], slack: usize) -> Buffer {
        let count = values.len() + slack;
        let mut buffer = Buffer::guarded(&self.queue.device(), count * size_of::<T>(), self.fill.guard)
            .expect("a case of the contract fits into memory");
        let mut held = values.to_vec();
        held.resize(count, T::of_fill(self.fill));
        buffer.write(0, &held).expect("a device takes a case's values");
        buffer
    }

    /// An input of exactly these values.
    pub fn input<T: Word>(&self, name: &'static str, values: &[T]) -> Input {
        let buffer = self.buffer(values, 0);
        Input { name, before: bytes(&buffer), buffer }
    }

    /// An input that may hold more rows than the launch has; those behind are poisoned.
    pub fn rows_in<T: Word>(&self, name: &'static str, values: &[T]) -> Input {
        let buffer = self.buffer(values, SLACK);
        Input { name, before: bytes(&buffer), buffer }
    }

    /// A poisoned output of `count` elements, and more behind it.
    pub fn output<T: Word>(&self, name: &'static str, count: usize) -> Output {
        let buffer = self.buffer(&vec![T::of_fill(self.fill); count], SLACK);
        Output { name, before: bytes(&buffer), buffer }
    }

    /// A buffer that the launch reads and overwrites, with poison behind it.
    pub fn in_place<T: Word>(&self, name: &'static str, values: &[T]) -> Output {
        let buffer = self.buffer(values, SLACK);
        Output { name, before: bytes(&buffer), buffer }
    }

    /// A cache of exactly these elements.
    pub fn cache<T: Word>(&self, name: &'static str, values: &[T]) -> Output {
        let buffer = self.buffer(values, 0);
        Output { name, before: bytes(&buffer), buffer }
    }

    /// A poisoned cache of exactly `count` elements.
    pub fn poisoned<T: Word>(&self, name: &'static str, count: usize) -> Output {
        self.cache(name, &vec![T::of_fill(self.fill); count])
    }

    /// Checks that an input is as it was.
    pub fn read(&mut self, mut input: Input) {
        if self.tamper == Some(Tamper::WritesInput)
            && let Some(byte) = bytes(&input.buffer).first()
        {
            input.buffer.write(0, &[byte ^ 1]).expect("a device takes a byte");
        }
        if let Some(at) = input.buffer.guard_damage() {
            self.problems.push(format!(
                "input {} was written at byte {at}, outside its {} bytes",
                input.name,
                input.before.len()
            ));
        }
        let changed = bytes(&input.buffer).iter().zip(&input.before).position(|(now, before)| now != before);
        if let Some(at) = changed {
            self.problems.push(format!("input {} was written at byte {at}", input.name));
        }
    }

    /// Checks what surrounds a scratch buffer.
    pub fn discard(&mut self, output: Output) {
        if let Some(at) = output.buffer.guard_damage() {
            self.problems.push(format!(
                "{} was written at byte {at}, outside its {} bytes",
                output.name,
                output.before.len()
            ));
        }
    }

    /// Takes row `i`'s elements `[i * width, (i + 1) * width)` of an output; all others must be as they were.
    pub fn rows<T: Word>(&mut self, output: Output, width: usize) {
        let ranges = (0..self.rows.len()).map(|row| (row, row * width..(row + 1) * width)).collect();
        self.ranges::<T>(output, ranges);
    }

    /// Takes the given ranges of an output for their picks; all other elements must be as they were.
    pub fn ranges<T: Word>(&mut self, output: Output, ranges: Vec<(usize, Range<usize>)>) {
        self.ranges_and_free::<T>(output, ranges, &[]);
    }

    /// What a launch may fill beside what it promises, where kernels store whole vectors: nothing on Metal.
    pub fn spare(&self, ranges: impl Iterator<Item = Range<usize>>) -> Vec<Range<usize>> {
        match self.queue.backend() {
            Some(Backend::Metal) => Vec::new(),
            Some(Backend::Cuda) | None => ranges.collect(),
        }
    }

    /// As [`Stage::ranges`], with ranges that the launch may use as it likes.
    pub fn ranges_and_free<T: Word>(
        &mut self,
        mut output: Output,
        ranges: Vec<(usize, Range<usize>)>,
        free: &[Range<usize>],
    ) {
        match self.tamper {
            Some(Tamper::WritesBefore) => output.buffer.break_guard(true),
            Some(Tamper::WritesBehind) => output.buffer.break_guard(false),
            _ => {}
        }
        if let Some(at) = output.buffer.guard_damage() {
            self.problems.push(format!(
                "{} was written at byte {at}, outside its {} bytes",
                output.name,
                output.before.len()
            ));
        }
        let last = ranges.iter().map(|(_, range)| range.end).max().unwrap_or(0);
        if self.tamper == Some(Tamper::LeavesLast) && last > 0 {
            let range = (last - 1) * size_of::<T>()..last * size_of::<T>();
            output.buffer.write(range.start, &output.before[range]).expect("a device takes what it gave");
        }
        let now = output.held::<T>();
        let mut promised = vec![false; now.len()];
        for range in free {
            promised[range.clone()].fill(true);
        }
        for (pick, range) in ranges {
            promised[range.clone()].fill(true);
            self.rows[pick].extend(now[range].iter().map(|element| element.word()));
        }
        let size = size_of::<T>();
        let now = bytes(&output.buffer);
        for (index, _) in promised.iter().enumerate().filter(|(_, promised)| !**promised) {
            let range = index * size..(index + 1) * size;
            if now[range.clone()] != output.before[range] {
                self.problems.push(format!("{} was written at element {index}, which is nobody's", output.name));
                break;
            }
        }
    }

    /// Adds words that a launch returned by other means.
    pub fn words(&mut self, pick: usize, words: impl IntoIterator<Item = u32>) {
        self.rows[pick].extend(words);
    }

    /// The words of every pick, and what was found wrong with the memory.
    pub fn finish(mut self, picks: &[super::Pick]) -> Outcome {
        let count = self.rows.len();
        for index in 0..count {
            let flip = match self.tamper {
                Some(Tamper::RowCount) => count > 2,
                Some(Tamper::ThreadCount) => self.threads > 1,
                Some(Tamper::Neighbour) => picks.get(index + 1).is_some_and(|next| next.row().is_none()),
                Some(Tamper::ReadsOutput) => self.fill.word & 2 != 0,
                Some(Tamper::CountsLaunches) => self.earlier_launches % 2 == 1,
                _ => false,
            };
            if flip && let Some(word) = self.rows[index].last_mut() {
                *word ^= 1;
            }
        }
        Outcome { rows: self.rows, problems: self.problems, elapsed: self.elapsed }
    }
}

fn bytes(buffer: &Buffer) -> Vec<u8> {
    buffer.to_vec().expect("a buffer of the contract can be read")
}
