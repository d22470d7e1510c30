//! Tiles of several weight rows times several activation rows, and the launch that deals them to threads.
//!
//! The order of one output is that of [`tf_numerics::sum`]. A group of padding adds positive zero to its accumulator, which
//! is all that its products would do. Threads own ranges of weight rows; neither ranges nor tiles appear in the order.

use super::{Finish, scale_value};
use std::ops::Range;
use tf_device::LaunchError;
use tf_device::cpu::{CpuQueue, Parts, split};
use tf_numerics::lanes::{Kernel, Lanes, Level, dispatch};
use tf_numerics::qdq::{self, Format};
use tf_numerics::sum::{ACCUMULATORS, GROUP, Sum};

/// Groups of one piece: one 64-byte load of FP4 codes, one round through the accumulators.
const PIECE_GROUPS: usize = ACCUMULATORS;
/// Weight rows and activation rows of a large tile: its accumulators fill 24 registers of 16 lanes. With more activation
/// rows than that a weight row is decoded once into memory.
const TILE_ROWS: usize = 2;
const TILE_INPUTS: usize = 3;
/// From this many groups on, such a tile would leave the first-level cache, and one accumulator is summed after the other.
const STRIDED_FROM: usize = 32;
/// Weight rows and activation rows of a tile of that form at most, and activation rows that keep their state.
const STRIDED_ROWS: usize = 4;
const STRIDED_INPUTS: usize = 4;
const STRIDED_BLOCK: usize = 64;
/// Where a vector takes several registers, long rows or not: 4 outputs at once.
const NARROW_ROWS: usize = 2;
const NARROW_INPUTS: usize = 2;
/// Activation rows from which that form pays for weights that need no decoding.
const STRIDED_INPUTS_FROM: usize = 8;
/// Two vectors for each output of a block.
const STRIDED_STATE: usize = STRIDED_BLOCK * STRIDED_ROWS * 2 * 16;
/// Multiply-adds that are worth one more thread: about the cost of starting it.
const THREAD_WORK: usize = 3 << 14;
/// Weights of one launch at most.
pub(crate) const TASKS_MAX: usize = 8;

/// A matrix whose rows can be read in pieces of four groups.
pub(crate) trait Source: Copy + Sync {
    const SCALED: bool;
    /// Whether decoding a row costs something, so that many activation rows should share it.
    const CODED: bool;
    type Piece<L: Lanes>: Copy;

    /// # Safety
    /// `row` and `piece` lie inside the matrix.
    unsafe fn piece<L: Lanes>(self, row: usize, piece: usize) -> Self::Piece<L>;
    /// The 2 x 16 weights of one group of a piece.
    ///
    /// # Safety
    /// The group lies inside the matrix.
    unsafe fn pair<L: Lanes>(piece: Self::Piece<L>, group_of_piece: usize) -> [L; 2];
    /// # Safety
    /// `row` and `group` lie inside the matrix.
    unsafe fn scale(self, row: usize, group: usize) -> f32;
}

/// E4M3 codes `[rows, stride]` with float32 scales `[ceil(rows / 32), stride / 32]`.
#[derive(Clone, Copy)]
pub(crate) struct Fp8<'a> {
    pub codes: &'a [u8],
    pub stride: usize,
    pub scales: &'a [f32],
}

impl Source for Fp8<'_> {
    const SCALED: bool = true;
    const CODED: bool = true;
    type Piece<L: Lanes> = *const u8;

    #[inline(always)]
    unsafe fn piece<L: Lanes>(self, row: usize, piece: usize) -> *const u8 {
        // SAFETY: the caller's row and piece start inside the codes.
        unsafe { self.codes.as_ptr().add(row * self.stride + piece * PIECE_GROUPS * GROUP) }
    }
    #[inline(always)]
    unsafe fn pair<L: Lanes>(piece: *const u8, group_of_piece: usize) -> [L; 2] {
        // SAFETY: the caller's group has 32 codes, none of them NaN (`linear_fp8::Weights::pack`).
        unsafe {
            let at = piece.add(group_of_piece * GROUP);
            [L::load_fp8_finite_ptr(at), L::load_fp8_finite_ptr(at.add(16))]
        }
    }
    #[inline(always)]
    unsafe fn scale(self, row: usize, group: usize) -> f32 {
        // SAFETY: the caller's row and group have a scale.
        unsafe { *self.scales.get_unchecked(row / GROUP * (self.stride / GROUP) + group) }
    }
}

/// E2M1 codes in layout B `[rows, stride bytes]` with E8M0 scales `[rows, groups]`.
#[derive(Clone, Copy)]
pub(crate) struct Fp4<'a> {
    pub codes: &'a [u8],
    pub stride: usize,
    pub scales: &'a [u8],
    pub groups: usize,
}

/// `code` -> its value. NaN has been refused, so code 255 is never looked up.
const SCALES: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = scale_value(code as u8);
        code += 1;
    }
    values
};

impl Source for Fp4<'_> {
    const SCALED: bool = true;
    const CODED: bool = true;
    type Piece<L: Lanes> = L::Int;

    #[inline(always)]
    unsafe fn piece<L: Lanes>(self, row: usize, piece: usize) -> L::Int {
        // SAFETY: the caller's row and piece have 64 bytes in the codes.
        unsafe { L::load_u32_ptr(self.codes.as_ptr().add(row * self.stride + piece * 64).cast()) }
    }
    #[inline(always)]
    unsafe fn pair<L: Lanes>(piece: L::Int, group_of_piece: usize) -> [L; 2] {
        let nibble = 2 * group_of_piece as u32;
        [L::decode_fp4(piece, nibble), L::decode_fp4(piece, nibble + 1)]
    }
    #[inline(always)]
    unsafe fn scale(self, row: usize, group: usize) -> f32 {
        // SAFETY: the caller's row and group have a scale.
        SCALES[unsafe { *self.scales.get_unchecked(row * self.groups + group) } as usize]
    }
}

/// bf16 weights `[rows, stride]`.
#[derive(Clone, Copy)]
pub(crate) struct Bf16<'a> {
    pub values: &'a [u16],
    pub stride: usize,
}

impl Source for Bf16<'_> {
    const SCALED: bool = false;
    const CODED: bool = true;
    type Piece<L: Lanes> = *const u16;

    #[inline(always)]
    unsafe fn piece<L: Lanes>(self, row: usize, piece: usize) -> *const u16 {
        // SAFETY: the caller's row and piece start inside the values.
        unsafe { self.values.as_ptr().add(row * self.stride + piece * PIECE_GROUPS * GROUP) }
    }
    #[inline(always)]
    unsafe fn pair<L: Lanes>(piece: *const u16, group_of_piece: usize) -> [L; 2] {
        // SAFETY: the caller's group has 32 values.
        unsafe {
            let at = piece.add(group_of_piece * GROUP);
            [L::load_bf16_ptr(at), L::load_bf16_ptr(at.add(16))]
        }
    }
    #[inline(always)]
    unsafe fn scale(self, _row: usize, _group: usize) -> f32 {
        1.0
    }
}

/// float32 weights `[rows, stride]`.
#[derive(Clone, Copy)]
pub(crate) struct F32<'a> {
    pub values: &'a [f32],
    pub stride: usize,
}

impl Source for F32<'_> {
    const SCALED: bool = false;
    const CODED: bool = false;
    type Piece<L: Lanes> = *const f32;

    #[inline(always)]
    unsafe fn piece<L: Lanes>(self, row: usize, piece: usize) -> *const f32 {
        // SAFETY: the caller's row and piece start inside the values.
        unsafe { self.values.as_ptr().add(row * self.stride + piece * PIECE_GROUPS * GROUP) }
    }
    #[inline(always)]
    unsafe fn pair<L: Lanes>(piece: *const f32, group_of_piece: usize) -> [L; 2] {
        // SAFETY: the caller's group has 32 values.
        unsafe {
            let at = piece.add(group_of_piece * GROUP);
            [L::load_ptr(at), L::load_ptr(at.add(16))]
        }
    }
    #[inline(always)]
    unsafe fn scale(self, _row: usize, _group: usize) -> f32 {
        1.0
    }
}

/// Decoded rows of one tile and, where the format has them, their scales.
#[derive(Clone, Copy)]
struct Panel<'a, const SCALED: bool> {
    /// `[TILE_ROWS, groups * 32]`
    values: &'a [f32],
    /// `[TILE_ROWS, groups]`
    scales: &'a [f32],
    groups: usize,
}

impl<const SCALED: bool> Source for Panel<'_, SCALED> {
    const SCALED: bool = SCALED;
    const CODED: bool = false;
    type Piece<L: Lanes> = *const f32;

    #[inline(always)]
    unsafe fn piece<L: Lanes>(self, row: usize, piece: usize) -> *const f32 {
        // SAFETY: the caller's row and piece start inside the values.
        unsafe { self.values.as_ptr().add((row * self.groups + piece * PIECE_GROUPS) * GROUP) }
    }
    #[inline(always)]
    unsafe fn pair<L: Lanes>(piece: *const f32, group_of_piece: usize) -> [L; 2] {
        // SAFETY: the caller's group has 32 values.
        unsafe {
            let at = piece.add(group_of_piece * GROUP);
            [L::load_ptr(at), L::load_ptr(at.add(16))]
        }
    }
    #[inline(always)]
    unsafe fn scale(self, row: usize, group: usize) -> f32 {
        // SAFETY: the caller's row and group have a scale.
        unsafe { *self.scales.get_unchecked(row * self.groups + group) }
    }
}

/// Floats that [`multiply`] wants as its panel, for rows of `groups` groups.
pub(crate) const fn panel_len(groups: usize) -> usize {
    let tile = TILE_ROWS * groups * (GROUP + 1);
    let strided = STRIDED_STATE + STRIDED_ROWS * groups.div_ceil(PIECE_GROUPS) * (GROUP + 1);
    if tile > strided { tile.next_multiple_of(16) } else { strided.next_multiple_of(16) }
}

/// Activation rows of a launch: all of a matrix, or chosen ones.
#[derive(Clone, Copy)]
pub(crate) struct Inputs<'a> {
    pub values: &'a [f32],
    /// Floats from one row to the next.
    pub stride: usize,
    /// First column.
    pub offset: usize,
    /// The rows by index; all of them in order where absent.
    pub chosen: Option<&'a [u32]>,
    pub count: usize,
}

impl Inputs<'_> {
    /// # Safety
    /// `index` is below `count`, and the rows lie inside `values`.
    #[inline(always)]
    unsafe fn row(self, index: usize) -> *const f32 {
        // SAFETY: the caller's promise.
        unsafe {
            let row = match self.chosen {
                Some(chosen) => *chosen.get_unchecked(index) as usize,
                None => index,
            };
            self.values.as_ptr().add(row * self.stride + self.offset)
        }
    }

    /// Panics unless every row has `columns` readable floats.
    fn check(self, columns: usize) {
        let last = match self.chosen {
            Some(chosen) => {
                assert!(chosen.len() >= self.count);
                chosen[..self.count].iter().max().map(|row| *row as usize)
            }
            None => self.count.checked_sub(1),
        };
        if let Some(last) = last {
            assert!(
                last * self.stride + self.offset + columns <= self.values.len(),
                "an activation row is out of range"
            );
        }
    }
}

/// One tile: `R` weight rows from `row` on times `M` activation rows.
///
/// # Safety
/// The rows lie inside the source, and every `x` is readable for `groups * 32` floats.
#[inline(always)]
unsafe fn tile<L: Lanes, S: Source, const R: usize, const M: usize>(
    source: S,
    row: usize,
    x: [*const f32; M],
    groups: usize,
) -> [[f32; M]; R] {
    let mut acc = [[Sum::<L>::zero(); M]; R];
    let pieces = groups / PIECE_GROUPS;
    // SAFETY: all accesses are to groups below `groups`.
    unsafe {
        for piece in 0..pieces {
            let held = hold::<L, S, R>(source, row, piece);
            // Written out: a loop would be compiled with its accumulators in memory.
            step::<L, S, R, M, 0>(source, row, x, held, piece, &mut acc);
            step::<L, S, R, M, 1>(source, row, x, held, piece, &mut acc);
            step::<L, S, R, M, 2>(source, row, x, held, piece, &mut acc);
            step::<L, S, R, M, 3>(source, row, x, held, piece, &mut acc);
        }
        let rest = groups % PIECE_GROUPS;
        if rest > 0 {
            let held = hold::<L, S, R>(source, row, pieces);
            step::<L, S, R, M, 0>(source, row, x, held, pieces, &mut acc);
            if rest > 1 {
                step::<L, S, R, M, 1>(source, row, x, held, pieces, &mut acc);
            } else {
                pad::<L, R, M, 1>(&mut acc);
            }
            if rest > 2 {
                step::<L, S, R, M, 2>(source, row, x, held, pieces, &mut acc);
            } else {
                pad::<L, R, M, 2>(&mut acc);
            }
            pad::<L, R, M, 3>(&mut acc);
        }
    }
    let mut sums = [[0.0; M]; R];
    for r in 0..R {
        for m in 0..M {
            sums[r][m] = acc[r][m].fold();
        }
    }
    sums
}

/// One piece of `R` rows.
///
/// # Safety
/// The piece lies inside the rows.
#[inline(always)]
unsafe fn hold<L: Lanes, S: Source, const R: usize>(source: S, row: usize, piece: usize) -> [S::Piece<L>; R] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut held = [source.piece::<L>(row, piece); R];
        for r in 1..R {
            held[r] = source.piece::<L>(row + r, piece);
        }
        held
    }
}

/// Group `B` of one piece.
///
/// # Safety
/// The group lies inside the rows, and every `x` is readable there.
#[inline(always)]
unsafe fn step<L: Lanes, S: Source, const R: usize, const M: usize, const B: usize>(
    source: S,
    row: usize,
    x: [*const f32; M],
    held: [S::Piece<L>; R],
    piece: usize,
    acc: &mut [[Sum<L>; M]; R],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let group = piece * PIECE_GROUPS + B;
        let mut x_pair = [[L::splat(0.0); 2]; M];
        for m in 0..M {
            let at = x[m].add(group * GROUP);
            x_pair[m] = [L::load_ptr(at), L::load_ptr(at.add(16))];
        }
        for r in 0..R {
            let pair = S::pair::<L>(held[r], B);
            if S::SCALED {
                let scale = L::splat(source.scale(row + r, group));
                for m in 0..M {
                    acc[r][m].scaled(B, pair, x_pair[m], scale);
                }
            } else {
                for m in 0..M {
                    acc[r][m].plain(B, pair, x_pair[m]);
                }
            }
        }
    }
}

/// What a group of padding does: its products are positive zeros.
#[inline(always)]
fn pad<L: Lanes, const R: usize, const M: usize, const B: usize>(acc: &mut [[Sum<L>; M]; R]) {
    for sums in acc {
        for sum in sums {
            sum.0[B] = sum.0[B] + L::splat(0.0);
        }
    }
}

/// Where [`multiply`] puts its results: output `row - first row` of input `i` at `start[i * stride + row - first row]`.
#[derive(Clone, Copy)]
pub(crate) struct Output {
    pub start: *mut f32,
    pub stride: usize,
}

/// `R` weight rows times every input.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn row_tile<L: Lanes, S: Source, const R: usize>(
    source: S,
    row: usize,
    inputs: Inputs<'_>,
    groups: usize,
    out: Output,
    out_row: usize,
) {
    // SAFETY: the caller's promise covers every input and output below `inputs.count`.
    unsafe {
        let mut at = 0;
        while at + TILE_INPUTS <= inputs.count {
            let x = [inputs.row(at), inputs.row(at + 1), inputs.row(at + 2)];
            put(tile::<L, S, R, 3>(source, row, x, groups), out, at, out_row);
            at += TILE_INPUTS;
        }
        match inputs.count - at {
            2 => {
                let x = [inputs.row(at), inputs.row(at + 1)];
                put(tile::<L, S, R, 2>(source, row, x, groups), out, at, out_row);
            }
            1 => put(tile::<L, S, R, 1>(source, row, [inputs.row(at)], groups), out, at, out_row),
            _ => {}
        }
    }
}

/// # Safety
/// The tile's outputs lie inside `out`.
#[inline(always)]
unsafe fn put<const R: usize, const M: usize>(sums: [[f32; M]; R], out: Output, input: usize, out_row: usize) {
    for m in 0..M {
        for r in 0..R {
            // SAFETY: the caller's promise.
            unsafe { *out.start.add((input + m) * out.stride + out_row + r) = sums[r][m] };
        }
    }
}

/// Weight rows `rows` of `source` times every input, unfinished float32 sums into `out`.
///
/// # Safety
/// The rows have `groups` groups and lie inside the source; every input row is readable for `groups * 32` floats; `out` is
/// writable for `inputs.count` rows of `rows.len()` floats, and nobody else touches them or `panel`.
///
/// # Panics
/// When `panel` is shorter than [`panel_len`].
pub(crate) unsafe fn multiply<S: Source>(
    level: Level,
    source: S,
    rows: Range<usize>,
    inputs: Inputs<'_>,
    groups: usize,
    out: Output,
    panel: &mut [f32],
) {
    assert!(panel.len() >= panel_len(groups));
    dispatch(level, Multiply { source, rows, inputs, groups, out, panel });
}

/// [`multiply`]'s arguments; made there only, so that its promises hold.
struct Multiply<'a, S> {
    source: S,
    rows: Range<usize>,
    inputs: Inputs<'a>,
    groups: usize,
    out: Output,
    panel: &'a mut [f32],
}

impl<S: Source> Kernel for Multiply<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Multiply { source, rows, inputs, groups, out, panel } = self;
        // SAFETY: the promises of `multiply` cover every row of the range; it asserted the panel's length.
        unsafe {
            if const { register_bytes::<L>() < 16 } {
                // Tiles are for registers; without them they would only be a lot of code.
                direct::<L, S, 1>(source, rows.clone(), inputs, groups, out, rows.start);
            } else if const { register_bytes::<L>() < 64 } {
                let mut row = rows.start;
                if inputs.count > NARROW_INPUTS {
                    row = rows.end - rows.len() % NARROW_ROWS;
                    let whole = rows.start..row;
                    strided::<L, S, NARROW_ROWS, NARROW_INPUTS>(source, whole, inputs, groups, out, panel);
                }
                direct::<L, S, NARROW_INPUTS>(source, row..rows.end, inputs, groups, out, rows.start);
            } else if S::CODED && inputs.count <= TILE_INPUTS {
                direct::<L, S, TILE_INPUTS>(source, rows.clone(), inputs, groups, out, rows.start);
            } else {
                let mut row = rows.start;
                let inputs_from = if S::CODED { 0 } else { STRIDED_INPUTS_FROM };
                if groups >= STRIDED_FROM && inputs.count >= inputs_from {
                    row = rows.end - rows.len() % STRIDED_ROWS;
                    let whole = rows.start..row;
                    strided::<L, S, STRIDED_ROWS, STRIDED_INPUTS>(source, whole, inputs, groups, out, panel);
                }
                tiled::<L, S>(source, row..rows.end, inputs, groups, out, rows.start, panel);
            }
        }
    }
}

/// Bytes of one register: the alignment of the vectors, which is that of one float where there are none.
const fn register_bytes<L: Lanes>() -> usize {
    align_of::<L>()
}

/// All rows times all inputs, up to `M` at a time, decoding in registers.
///
/// # Safety
/// As [`multiply`]; output 0 is row `first_row`.
#[inline(always)]
unsafe fn direct<L: Lanes, S: Source, const M: usize>(
    source: S,
    rows: Range<usize>,
    inputs: Inputs<'_>,
    groups: usize,
    out: Output,
    first_row: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut at = 0;
        while at < inputs.count {
            let count = M.min(inputs.count - at);
            match count {
                1 => direct_rows::<L, S, 1>(source, rows.clone(), inputs, at, groups, out, first_row),
                2 if M >= 2 => direct_rows::<L, S, 2>(source, rows.clone(), inputs, at, groups, out, first_row),
                _ if M >= 3 => direct_rows::<L, S, 3>(source, rows.clone(), inputs, at, groups, out, first_row),
                _ => {}
            }
            at += count;
        }
    }
}

/// All rows times inputs `[at, at + M)`.
///
/// # Safety
/// As [`direct`].
#[inline(always)]
unsafe fn direct_rows<L: Lanes, S: Source, const M: usize>(
    source: S,
    rows: Range<usize>,
    inputs: Inputs<'_>,
    at: usize,
    groups: usize,
    out: Output,
    first_row: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut x = [inputs.row(at); M];
        for m in 1..M {
            x[m] = inputs.row(at + m);
        }
        for row in rows {
            put(tile::<L, S, 1, M>(source, row, x, groups), out, at, row - first_row);
        }
    }
}

/// Tiles of [`TILE_ROWS`] rows, each decoded into memory before its inputs where decoding costs something.
///
/// # Safety
/// As [`multiply`]; output 0 is row `first_row`.
#[inline(always)]
unsafe fn tiled<L: Lanes, S: Source>(
    source: S,
    rows: Range<usize>,
    inputs: Inputs<'_>,
    groups: usize,
    out: Output,
    first_row: usize,
    panel: &mut [f32],
) {
    let (values, scales) = panel.split_at_mut(TILE_ROWS * groups * GROUP);
    let mut row = rows.start;
    // SAFETY: the caller's promise, and the lengths of `panel_len`.
    unsafe {
        while row < rows.end {
            let out_row = row - first_row;
            let tile_rows = (rows.end - row).min(TILE_ROWS);
            if S::CODED {
                for r in 0..tile_rows {
                    let (values, scales) = (values.as_mut_ptr(), scales.as_mut_ptr());
                    let at = r * groups;
                    decode::<L, S>(source, row + r, groups, values.add(at * GROUP), scales.add(at));
                }
                if S::SCALED {
                    let panel = Panel::<true> { values, scales, groups };
                    either::<L, _>(panel, 0, tile_rows, inputs, groups, out, out_row);
                } else {
                    let panel = Panel::<false> { values, scales, groups };
                    either::<L, _>(panel, 0, tile_rows, inputs, groups, out, out_row);
                }
            } else {
                either::<L, _>(source, row, tile_rows, inputs, groups, out, out_row);
            }
            row += tile_rows;
        }
    }
}

/// Long rows times many inputs. The groups of one accumulator are summed for a block of inputs before those of the next, so
/// that a quarter of the decoded weights stays in the first-level cache and an output needs one register. The order of an
/// output is unchanged: its accumulators never meet before the end.
///
/// # Safety
/// As [`multiply`]; the rows are a multiple of `R`.
#[inline(always)]
unsafe fn strided<L: Lanes, S: Source, const R: usize, const M: usize>(
    source: S,
    rows: Range<usize>,
    inputs: Inputs<'_>,
    groups: usize,
    out: Output,
    panel: &mut [f32],
) {
    let quarter = groups.div_ceil(PIECE_GROUPS);
    let (state, panel) = panel.split_at_mut(STRIDED_STATE);
    let (values, scales) = panel.split_at_mut(R * quarter * GROUP);
    // SAFETY: the caller's promise, and the lengths of `panel_len`.
    unsafe {
        for block in (0..inputs.count).step_by(STRIDED_BLOCK) {
            let block_end = inputs.count.min(block + STRIDED_BLOCK);
            for row in rows.clone().step_by(R) {
                for b in 0..PIECE_GROUPS {
                    // Groups b, b + 4, .. below `groups`; a last one that is padding adds zero.
                    let count = groups.saturating_sub(b).div_ceil(PIECE_GROUPS);
                    for r in 0..R {
                        for at in 0..count {
                            let [low, high] = S::pair::<L>(source.piece::<L>(row + r, at), b);
                            let to = values.as_mut_ptr().add((r * quarter + at) * GROUP);
                            low.store_ptr(to);
                            high.store_ptr(to.add(16));
                            if S::SCALED {
                                *scales.get_unchecked_mut(r * quarter + at) =
                                    source.scale(row + r, at * PIECE_GROUPS + b);
                            }
                        }
                    }
                    let part = Quarter { values, scales, quarter, count, b };
                    let mut at = block;
                    while at < block_end {
                        let state = state.as_mut_ptr().add((at - block) * R * 2 * 16);
                        let out_row = row - rows.start;
                        let count = (block_end - at).min(M);
                        let mut x = [inputs.row(at); M];
                        for m in 1..count {
                            x[m] = inputs.row(at + m);
                        }
                        match count {
                            1 => part.tile::<L, S, R, 1>(first(x), state, out, at, out_row),
                            2 if M >= 2 => part.tile::<L, S, R, 2>(first(x), state, out, at, out_row),
                            3 if M >= 3 => part.tile::<L, S, R, 3>(first(x), state, out, at, out_row),
                            _ if M >= 4 => part.tile::<L, S, R, 4>(first(x), state, out, at, out_row),
                            _ => {}
                        }
                        at += count;
                    }
                }
            }
        }
    }
}

/// The first `N` of `M` rows.
#[inline(always)]
fn first<const M: usize, const N: usize>(x: [*const f32; M]) -> [*const f32; N] {
    std::array::from_fn(|m| x[m])
}

/// The decoded groups of accumulator `b`, of the rows of a tile.
#[derive(Clone, Copy)]
struct Quarter<'a> {
    /// `[rows, quarter * 32]`, `count` groups of each in use.
    values: &'a [f32],
    /// `[rows, quarter]`
    scales: &'a [f32],
    quarter: usize,
    count: usize,
    b: usize,
}

impl Quarter<'_> {
    /// Accumulator `b` of `R` x `M` outputs, and after the last one the outputs themselves. `state` holds, for
    /// each input and row, the sum of the first two accumulators and the third one.
    ///
    /// # Safety
    /// As [`strided`]; `state` is writable for `M * R * 2` vectors.
    #[inline(always)]
    unsafe fn tile<L: Lanes, S: Source, const R: usize, const M: usize>(
        self,
        x: [*const f32; M],
        state: *mut f32,
        out: Output,
        input: usize,
        out_row: usize,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut acc = [[L::splat(0.0); M]; R];
            for at in 0..self.count {
                let mut x_pair = [[L::splat(0.0); 2]; M];
                for m in 0..M {
                    let from = x[m].add((at * PIECE_GROUPS + self.b) * GROUP);
                    x_pair[m] = [L::load_ptr(from), L::load_ptr(from.add(16))];
                }
                for r in 0..R {
                    let from = self.values.as_ptr().add((r * self.quarter + at) * GROUP);
                    let pair = [L::load_ptr(from), L::load_ptr(from.add(16))];
                    if S::SCALED {
                        let scale = L::splat(*self.scales.get_unchecked(r * self.quarter + at));
                        for m in 0..M {
                            acc[r][m] = pair[1].fma(x_pair[m][1], pair[0] * x_pair[m][0]).fma(scale, acc[r][m]);
                        }
                    } else {
                        for m in 0..M {
                            acc[r][m] = pair[1].fma(x_pair[m][1], pair[0].fma(x_pair[m][0], acc[r][m]));
                        }
                    }
                }
            }
            for m in 0..M {
                for r in 0..R {
                    let pair = state.add((m * R + r) * 2 * 16);
                    let third = pair.add(16);
                    let mut sum = acc[r][m];
                    if self.count < self.quarter {
                        sum = sum + L::splat(0.0);
                    }
                    match self.b {
                        0 => sum.store_ptr(pair),
                        1 => (L::load_ptr(pair) + sum).store_ptr(pair),
                        2 => sum.store_ptr(third),
                        _ => {
                            let sum = L::load_ptr(pair) + (L::load_ptr(third) + sum);
                            *out.start.add((input + m) * out.stride + out_row + r) = sum.fold();
                        }
                    }
                }
            }
        }
    }
}

/// A full tile of rows, or the last odd one.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn either<L: Lanes, S: Source>(
    source: S,
    row: usize,
    tile_rows: usize,
    inputs: Inputs<'_>,
    groups: usize,
    out: Output,
    out_row: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        if tile_rows == TILE_ROWS {
            row_tile::<L, S, TILE_ROWS>(source, row, inputs, groups, out, out_row);
        } else {
            row_tile::<L, S, 1>(source, row, inputs, groups, out, out_row);
        }
    }
}

/// One row into memory: its weights without the scale, and its scales.
///
/// # Safety
/// The row lies inside the source; `values` is writable for `groups * 32` floats, `scales` for `groups`.
#[inline(always)]
unsafe fn decode<L: Lanes, S: Source>(source: S, row: usize, groups: usize, values: *mut f32, scales: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe {
        for piece in 0..groups.div_ceil(PIECE_GROUPS) {
            let held = source.piece::<L>(row, piece);
            for b in 0..PIECE_GROUPS {
                let group = piece * PIECE_GROUPS + b;
                if group < groups {
                    let [low, high] = S::pair::<L>(held, b);
                    low.store_ptr(values.add(group * GROUP));
                    high.store_ptr(values.add(group * GROUP + 16));
                    if S::SCALED {
                        *scales.add(group) = source.scale(row, group);
                    }
                }
            }
        }
    }
}

/// Finishes outputs `range` of each of `count` rows of `out`, which is `[count, row_len]`.
///
/// # Safety
/// Nobody else touches these outputs.
unsafe fn finish(
    level: Level,
    out: &Parts<'_, f32>,
    count: usize,
    row_len: usize,
    range: Range<usize>,
    finish: Finish,
) {
    if finish != Finish::F32 {
        dispatch(level, FinishRows { out, count, row_len, range, quantise: finish == Finish::Qdq8 });
    }
}

/// [`finish`]'s arguments; made there only, so that its promise holds.
struct FinishRows<'a> {
    out: &'a Parts<'a, f32>,
    count: usize,
    row_len: usize,
    range: Range<usize>,
    quantise: bool,
}

impl Kernel for FinishRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        for row in 0..self.count {
            let at = row * self.row_len;
            // SAFETY: the promise of `finish`.
            let values = unsafe { self.out.part(at + self.range.start..at + self.range.end) };
            round_bf16::<L>(values);
            if self.quantise {
                qdq::round_row_lanes::<L>(Format::Fp8, values);
            }
        }
    }
}

/// Rounds every value to bf16.
#[inline(always)]
pub(crate) fn round_bf16<L: Lanes>(values: &mut [f32]) {
    let mut chunks = values.chunks_exact_mut(16);
    for chunk in &mut chunks {
        L::load(chunk).bf16_round().store(chunk);
    }
    let rest = chunks.into_remainder();
    if !rest.is_empty() {
        L::load_partial(rest, 0.0).bf16_round().store_partial(rest);
    }
}

/// A dense weight of any stored form.
#[derive(Clone, Copy)]
pub(crate) enum Matrix<'a> {
    Fp8(Fp8<'a>),
    Bf16(Bf16<'a>),
    F32(F32<'a>),
}

/// One weight of a launch.
pub(crate) struct Task<'a> {
    pub matrix: Matrix<'a>,
    pub rows: usize,
    /// `[inputs, rows]`
    pub out: Parts<'a, f32>,
    pub finish: Finish,
}

/// Threads worth using for a launch.
pub(crate) fn threads_for(queue: &CpuQueue, multiply_adds: usize) -> usize {
    (multiply_adds / THREAD_WORK).clamp(1, queue.pool.threads())
}

/// Every task over the same inputs. `x`: `[.., x_groups * columns]`; with more than one group, block `g` of a task's rows
/// multiplies column block `g`.
///
/// # Errors
/// [`LaunchError`] when there are too many tasks or no room for scratch.
pub(crate) fn run(
    queue: &mut CpuQueue,
    x: &[f32],
    chosen: Option<&[u32]>,
    count: usize,
    x_groups: usize,
    columns: usize,
    tasks: &[Option<Task<'_>>],
) -> Result<(), LaunchError> {
    let groups = columns.div_ceil(GROUP);
    let padded_columns = groups * GROUP;
    let work = tasks.iter().flatten().map(|task| task.rows * padded_columns * (count + 1)).sum();
    let threads = threads_for(queue, work);
    let panel = panel_len(groups);
    let padding = if padded_columns == columns { 0 } else { count * x_groups * padded_columns };
    let scratch = queue.scratch.values(padding.next_multiple_of(16) + threads * panel)?;
    let (padded, panels) = scratch.split_at_mut(padding.next_multiple_of(16));
    let mut inputs = Inputs { values: x, stride: x_groups * columns, offset: 0, chosen, count };
    if padding > 0 {
        for (index, row) in padded.chunks_exact_mut(x_groups * padded_columns).enumerate() {
            let from = chosen.map_or(index, |chosen| chosen[index] as usize) * x_groups * columns;
            for (block, padded) in row.chunks_exact_mut(padded_columns).enumerate() {
                padded[..columns].copy_from_slice(&x[from + block * columns..][..columns]);
                padded[columns..].fill(0.0);
            }
        }
        inputs = Inputs { values: padded, stride: x_groups * padded_columns, offset: 0, chosen: None, count };
    }
    inputs.check(x_groups * padded_columns);
    let panels = Parts::new(panels);
    let level = queue.level;
    queue.pool.run_on(threads, |index, thread_count| {
        // SAFETY: each thread takes the panel of its own index.
        let panel = unsafe { panels.part(index * panel..(index + 1) * panel) };
        for task in tasks.iter().flatten() {
            let unit = if task.finish == Finish::Qdq8 { GROUP } else { 4 };
            let rows = split(task.rows, thread_count, index, unit);
            // SAFETY: the ranges of the threads are disjoint, and the launch checked weights and inputs against each other.
            unsafe {
                match task.matrix {
                    Matrix::Fp8(matrix) => stripe(level, matrix, task, rows, inputs, x_groups, groups, panel),
                    Matrix::Bf16(matrix) => stripe(level, matrix, task, rows, inputs, x_groups, groups, panel),
                    Matrix::F32(matrix) => stripe(level, matrix, task, rows, inputs, x_groups, groups, panel),
                }
            }
        }
    });
    Ok(())
}

/// One thread's rows of one task.
///
/// # Safety
/// As [`multiply`]; outputs `rows` of every input are this caller's alone.
unsafe fn stripe<S: Source>(
    level: Level,
    source: S,
    task: &Task<'_>,
    rows: Range<usize>,
    inputs: Inputs<'_>,
    x_groups: usize,
    groups: usize,
    panel: &mut [f32],
) {
    if rows.is_empty() {
        return;
    }
    assert_eq!(task.out.len(), inputs.count * task.rows);
    let block_rows = task.rows / x_groups;
    let mut start = rows.start;
    while start < rows.end {
        let block = start / block_rows;
        let end = rows.end.min((block + 1) * block_rows);
        let inputs = Inputs { offset: block * groups * GROUP, ..inputs };
        // SAFETY: `start` lies inside the output's first row (asserted above); the rest is the caller's promise.
        unsafe {
            let out = Output { start: task.out.as_ptr().add(start), stride: task.rows };
            multiply(level, source, start..end, inputs, groups, out, panel);
        }
        start = end;
    }
    // SAFETY: the caller's promise.
    unsafe { finish(level, &task.out, inputs.count, task.rows, rows, task.finish) };
}
