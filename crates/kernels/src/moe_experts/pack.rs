//! Checkpoint bytes -> layout B and its scales, one buffer an expert, and back. GPUs have layouts of their own:
//! [`pack_cuda`], [`pack_metal`].

use super::{COLUMNS_MAX, pack_cuda, pack_metal};
use crate::linear_fp8;
use crate::pack::{PackError, check_length, check_multiple, check_scales};
use tf_device::gpu::Backend;
use tf_device::{Buffer, Device, HostBytes, LaunchError, Queue};

/// Weights that share one scale, along a row.
pub(crate) const GROUP: usize = 32;
/// Weights of one 64-byte piece of layout B.
pub(crate) const PIECE: usize = 128;
const PIECE_BYTES: usize = 64;

/// The tensors of one routed expert as the checkpoint stores them: FP4 weights, element `2k` in the low nibble of byte `k`,
/// and E8M0 scales, one a row and 32 columns.
#[derive(Clone, Copy, Debug)]
pub struct ExpertBytes<'a> {
    /// `[intermediate, hidden / 2]`
    pub w1: &'a [u8],
    /// `[intermediate, hidden / 32]`
    pub w1_scale: &'a [u8],
    /// `[intermediate, hidden / 2]`
    pub w3: &'a [u8],
    /// `[intermediate, hidden / 32]`
    pub w3_scale: &'a [u8],
    /// `[hidden, intermediate / 2]`
    pub w2: &'a [u8],
    /// `[hidden, intermediate / 32]`
    pub w2_scale: &'a [u8],
}

/// One packed routed expert.
#[derive(Debug)]
pub struct Expert {
    hidden: usize,
    intermediate: usize,
    held: Held,
}

/// Where an expert's packed bytes are.
#[derive(Debug)]
enum Held {
    Cpu(Buffer),
    /// Packed for a GPU and still on the host: Metal has one part, the tensors as the checkpoint stores them; CUDA the codes
    /// and scales of [`pack_cuda`], up and down. [`Weights::new`] takes them to the device.
    Parts(Vec<Vec<u8>>),
    /// Where the checkpoint keeps them, for Metal.
    InPlace,
}

/// The shared expert: three FP8 linears.
#[derive(Debug)]
pub struct Shared {
    /// `[intermediate, hidden]`
    pub w1: linear_fp8::Weights,
    /// `[intermediate, hidden]`
    pub w3: linear_fp8::Weights,
    /// `[hidden, intermediate]`
    pub w2: linear_fp8::Weights,
}

/// Experts of one layer where the checkpoint keeps them.
#[derive(Debug)]
pub struct Placed {
    count: usize,
    hidden: usize,
    intermediate: usize,
    parts: [Buffer; 2],
}

impl Placed {
    /// `span` holds the bytes of all `experts`. `None` where the device has a layout of its own or needs a copy, or where a
    /// tensor lies elsewhere: then they are to be packed.
    ///
    /// # Errors
    /// As [`Expert::pack`].
    pub fn find(
        device: &Device,
        span: &HostBytes<'_>,
        experts: &[ExpertBytes<'_>],
        hidden: usize,
        intermediate: usize,
    ) -> Result<Option<Placed>, PackError> {
        if device.backend() != Some(Backend::Metal) {
            return Ok(None);
        }
        let parts = pack_metal::in_place(device, span, experts, hidden, intermediate)?;
        Ok(parts.map(|parts| Placed { count: experts.len(), hidden, intermediate, parts }))
    }
}

/// The experts of one layer, all of one shape.
#[derive(Debug)]
pub struct Weights {
    experts: Vec<Expert>,
    shared: Shared,
    /// On a GPU: each part of all experts, one expert after the other. Metal's last part is the table of [`pack_metal`].
    parts: Vec<Buffer>,
}

impl Weights {
    /// `experts` by expert id, packed for the device of `shared`.
    ///
    /// # Errors
    /// [`LaunchError::Shape`] when the shapes differ; [`LaunchError::DeviceMemory`].
    pub fn new(mut experts: Vec<Expert>, shared: Shared) -> Result<Weights, LaunchError> {
        let (hidden, intermediate) = (shared.w1.columns(), shared.w1.rows());
        LaunchError::check_shape("the shared w3's row count", shared.w3.rows(), intermediate)?;
        LaunchError::check_shape("the shared w3's column count", shared.w3.columns(), hidden)?;
        LaunchError::check_shape("the shared w2's row count", shared.w2.rows(), hidden)?;
        LaunchError::check_shape("the shared w2's column count", shared.w2.columns(), intermediate)?;
        let whole_blocks = intermediate.next_multiple_of(GROUP);
        LaunchError::check_shape("the shared expert's intermediate size", intermediate, whole_blocks)?;
        LaunchError::check_shape("the hidden size", hidden, hidden.next_multiple_of(GROUP))?;
        for expert in &experts {
            LaunchError::check_shape("an expert's hidden size", expert.hidden, hidden)?;
            LaunchError::check_shape("an expert's intermediate size", expert.intermediate, intermediate)?;
        }
        let parts = gather_parts(&mut experts, &shared.w1.buffers().0.device())?;
        Ok(Weights { experts, shared, parts })
    }

    /// Experts that stay where the checkpoint keeps them.
    ///
    /// # Errors
    /// As [`Weights::new`].
    pub fn in_place(placed: Placed, shared: Shared) -> Result<Weights, LaunchError> {
        let Placed { count, hidden, intermediate, parts } = placed;
        let expert = |_| Expert { hidden, intermediate, held: Held::InPlace };
        let mut weights = Weights::new((0..count).map(expert).collect(), shared)?;
        weights.parts = parts.into();
        Ok(weights)
    }

    /// `count` experts whose packed bytes are already on a CUDA device, as [`pack_cuda`] lays them out: up codes, up scales,
    /// down codes and down scales, each of all experts. For random weights that are made there.
    ///
    /// # Errors
    /// [`LaunchError::Shape`] when a buffer's length is not the packed one.
    pub fn from_packed(count: usize, shared: Shared, parts: [Buffer; 4]) -> Result<Weights, LaunchError> {
        let (hidden, intermediate) = (shared.w1.columns(), shared.w1.rows());
        for (part, bytes) in parts.iter().zip(pack_cuda::packed_len(hidden, intermediate)) {
            LaunchError::check_shape("the bytes of the experts' part", part.len_bytes(), count * bytes)?;
        }
        let expert = |_| Expert { hidden, intermediate, held: Held::Parts(Vec::new()) };
        let mut weights = Weights::new((0..count).map(expert).collect(), shared)?;
        weights.parts = parts.into();
        Ok(weights)
    }

    /// `count` experts of which the first are `distinct` and the others their copies in turn, each in memory of its own:
    /// for measurements, which need the addresses and not the values.
    ///
    /// # Errors
    /// As [`Weights::new`]; [`LaunchError::Shape`] without a distinct one.
    pub fn repeated(mut distinct: Vec<Expert>, count: usize, shared: Shared) -> Result<Weights, LaunchError> {
        let kinds = distinct.len();
        LaunchError::check_shape("the distinct experts", kinds, kinds.max(1))?;
        let device = shared.w1.buffers().0.device();
        let Device::Gpu(gpu) = &device else {
            for index in kinds..count {
                let copy = distinct[index % kinds].duplicate()?;
                distinct.push(copy);
            }
            distinct.truncate(count);
            return Weights::new(distinct, shared);
        };
        let mut weights = Weights::new(distinct, shared)?;
        let mut queue = Queue::gpu(gpu);
        let (hidden, intermediate) = (weights.hidden(), weights.intermediate());
        if device.backend() == Some(Backend::Metal) {
            weights.parts.pop();
        }
        for part in &mut weights.parts {
            let bytes = part.len_bytes() / kinds;
            let mut all = Buffer::zeroed(&device, bytes * count)?;
            for index in 0..count {
                queue.copy(part, index % kinds * bytes, &mut all, index * bytes, bytes)?;
            }
            *part = all;
        }
        if device.backend() == Some(Backend::Metal) {
            weights.parts.push(pack_metal::places_of(&device, count, hidden, intermediate)?);
        }
        weights.experts.clear();
        weights.experts.extend((0..count).map(|_| Expert { hidden, intermediate, held: Held::Parts(Vec::new()) }));
        Ok(weights)
    }

    /// The same experts in memory of their own, on the same device.
    ///
    /// # Errors
    /// [`LaunchError::Memory`] or [`LaunchError::DeviceMemory`].
    pub fn duplicate(&self) -> Result<Weights, LaunchError> {
        let experts = self.experts.iter().map(Expert::duplicate).collect::<Result<_, _>>()?;
        let parts = self.parts.iter().map(Buffer::duplicate).collect::<Result<_, _>>()?;
        Ok(Weights { experts, shared: self.shared.duplicate()?, parts })
    }

    /// On a GPU: each part of all experts.
    pub(crate) fn parts(&self) -> &[Buffer] {
        &self.parts
    }

    pub fn experts(&self) -> &[Expert] {
        &self.experts
    }

    pub fn shared(&self) -> &Shared {
        &self.shared
    }

    pub fn hidden(&self) -> usize {
        self.shared.w1.columns()
    }

    pub fn intermediate(&self) -> usize {
        self.shared.w1.rows()
    }

    /// Bytes held on the device.
    pub fn bytes(&self) -> usize {
        let is_mapped = |part: &&Buffer| matches!(part, Buffer::Gpu(buffer) if buffer.is_mapped());
        let parts = self.parts.iter().filter(|part| !is_mapped(part)).map(Buffer::len_bytes).sum::<usize>();
        self.experts.iter().map(Expert::bytes).sum::<usize>() + parts + self.shared.bytes()
    }

    /// Bytes that the experts of one layer will hold: for the memory plan.
    pub const fn bytes_for(expert_count: usize, hidden: usize, intermediate: usize) -> usize {
        let up = linear_fp8::Weights::bytes_for(intermediate, hidden);
        let down = linear_fp8::Weights::bytes_for(hidden, intermediate);
        expert_count * Expert::bytes_for(hidden, intermediate) + 2 * up + down
    }
}

impl Shared {
    fn duplicate(&self) -> Result<Shared, LaunchError> {
        Ok(Shared { w1: self.w1.duplicate()?, w3: self.w3.duplicate()?, w2: self.w2.duplicate()? })
    }

    pub fn bytes(&self) -> usize {
        self.w1.bytes() + self.w3.bytes() + self.w2.bytes()
    }
}

/// One FP4 matrix inside an expert's buffer.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub columns: usize,
    /// `[rows, code_stride]`
    pub codes: &'a [u8],
    pub code_stride: usize,
    /// `[rows, columns / 32]`
    pub scales: &'a [u8],
}

const fn code_stride(columns: usize) -> usize {
    columns.div_ceil(PIECE) * PIECE_BYTES
}

impl Expert {
    /// Packs one expert. `hidden` and `intermediate` are multiples of 32.
    ///
    /// # Errors
    /// [`PackError`] when a byte count differs from the shape, a scale is not a number, or the device has no room.
    pub fn pack(
        device: &Device,
        bytes: ExpertBytes<'_>,
        hidden: usize,
        intermediate: usize,
    ) -> Result<Expert, PackError> {
        check_sizes(hidden, intermediate)?;
        if device.backend() == Some(Backend::Cuda) {
            let (up, down) = pack_cuda::pack(bytes, hidden, intermediate)?;
            let parts = vec![up.codes, up.scales, down.codes, down.scales];
            return Ok(Expert { hidden, intermediate, held: Held::Parts(parts) });
        }
        if device.backend() == Some(Backend::Metal) {
            let parts = vec![pack_metal::gather(bytes, hidden, intermediate)?];
            return Ok(Expert { hidden, intermediate, held: Held::Parts(parts) });
        }
        let mut buffer = Buffer::zeroed(device, Expert::bytes_for(hidden, intermediate))?;
        pack_matrices(buffer.u8_mut(), bytes, hidden, intermediate)?;
        Ok(Expert { hidden, intermediate, held: Held::Cpu(buffer) })
    }

    /// The same expert in memory of its own.
    fn duplicate(&self) -> Result<Expert, LaunchError> {
        let held = match &self.held {
            Held::Cpu(buffer) => Held::Cpu(buffer.duplicate()?),
            Held::Parts(parts) => Held::Parts(parts.clone()),
            Held::InPlace => Held::InPlace,
        };
        Ok(Expert { hidden: self.hidden, intermediate: self.intermediate, held })
    }

    /// The checkpoint's bytes again, in the order of [`ExpertBytes`]. On the CPU.
    pub fn unpack(&self) -> [Vec<u8>; 6] {
        let mut tensors = Vec::with_capacity(6);
        for matrix in [self.w1(), self.w3(), self.w2()] {
            let rows = matrix.codes.chunks_exact(matrix.code_stride);
            tensors.push(rows.flat_map(|row| unpack_row(row, matrix.columns)).collect());
            tensors.push(matrix.scales.to_vec());
        }
        tensors.try_into().expect("three matrices give six tensors")
    }

    pub fn hidden(&self) -> usize {
        self.hidden
    }

    pub fn intermediate(&self) -> usize {
        self.intermediate
    }

    /// Bytes held: on the CPU, in the checkpoint, or on the host until [`Weights::new`] takes them to a GPU.
    pub fn bytes(&self) -> usize {
        match &self.held {
            Held::Cpu(buffer) => buffer.len_bytes(),
            Held::Parts(parts) => parts.iter().map(Vec::len).sum(),
            Held::InPlace => pack_metal::expert_bytes(self.hidden, self.intermediate),
        }
    }

    /// Bytes that an expert of this shape will hold: for the memory plan.
    pub const fn bytes_for(hidden: usize, intermediate: usize) -> usize {
        Layout::of(hidden, intermediate).total
    }

    pub(crate) fn w1(&self) -> Matrix<'_> {
        self.matrix(0, self.intermediate, self.hidden)
    }

    pub(crate) fn w3(&self) -> Matrix<'_> {
        self.matrix(1, self.intermediate, self.hidden)
    }

    pub(crate) fn w2(&self) -> Matrix<'_> {
        self.matrix(2, self.hidden, self.intermediate)
    }

    fn matrix(&self, index: usize, rows: usize, columns: usize) -> Matrix<'_> {
        let layout = Layout::of(self.hidden, self.intermediate);
        let packed = match &self.held {
            Held::Cpu(buffer) => buffer.u8(),
            Held::Parts(_) | Held::InPlace => panic!("an expert of a GPU has no matrix in the CPU's layout"),
        };
        Matrix {
            columns,
            codes: &packed[layout.codes[index]..][..rows * code_stride(columns)],
            code_stride: code_stride(columns),
            scales: &packed[layout.scales[index]..][..rows * (columns / GROUP)],
        }
    }
}

/// A matrix of an expert as stored, with the names of weight and scale, and its shape.
struct StoredMatrix<'a> {
    names: [&'static str; 2],
    weight: &'a [u8],
    scale: &'a [u8],
    rows: usize,
    columns: usize,
}

/// w1, w3 and w2, each of its shape's length and with scales that are numbers.
fn matrices(bytes: ExpertBytes<'_>, hidden: usize, intermediate: usize) -> Result<[StoredMatrix<'_>; 3], PackError> {
    let of = |names, weight, scale, rows, columns| StoredMatrix { names, weight, scale, rows, columns };
    let matrices = [
        of(["w1", "the scale of w1"], bytes.w1, bytes.w1_scale, intermediate, hidden),
        of(["w3", "the scale of w3"], bytes.w3, bytes.w3_scale, intermediate, hidden),
        of(["w2", "the scale of w2"], bytes.w2, bytes.w2_scale, hidden, intermediate),
    ];
    for StoredMatrix { names, weight, scale, rows, columns } in &matrices {
        check_length(names[0], weight, rows * columns / 2, *rows, columns / 2)?;
        check_length(names[1], scale, rows * columns / GROUP, *rows, columns / GROUP)?;
        check_scales(scale, columns / GROUP)?;
    }
    Ok(matrices)
}

/// Refuses an expert that [`Expert::pack`] would refuse.
pub(super) fn check_tensors(bytes: ExpertBytes<'_>, hidden: usize, intermediate: usize) -> Result<(), PackError> {
    check_sizes(hidden, intermediate)?;
    matrices(bytes, hidden, intermediate).map(|_| ())
}

fn check_sizes(hidden: usize, intermediate: usize) -> Result<(), PackError> {
    check_multiple("the hidden size", hidden, GROUP)?;
    check_multiple("the expert's intermediate size", intermediate, GROUP)?;
    LaunchError::check_limit("the hidden size", hidden, COLUMNS_MAX)?;
    LaunchError::check_limit("the expert's intermediate size", intermediate, COLUMNS_MAX)?;
    Ok(())
}

/// Writes the three matrices into `packed`, which is zero and holds [`Expert::bytes_for`] bytes.
fn pack_matrices(
    packed: &mut [u8],
    bytes: ExpertBytes<'_>,
    hidden: usize,
    intermediate: usize,
) -> Result<(), PackError> {
    let layout = Layout::of(hidden, intermediate);
    for (index, matrix) in matrices(bytes, hidden, intermediate)?.into_iter().enumerate() {
        let StoredMatrix { weight, scale, rows, columns, .. } = matrix;
        let codes = &mut packed[layout.codes[index]..][..rows * code_stride(columns)];
        for (packed, row) in codes.chunks_exact_mut(code_stride(columns)).zip(weight.chunks_exact(columns / 2)) {
            pack_row(packed, row);
        }
        packed[layout.scales[index]..][..scale.len()].copy_from_slice(scale);
    }
    Ok(())
}

/// Takes what the experts hold for a GPU to `device`, one buffer a part.
fn gather_parts(experts: &mut [Expert], device: &Device) -> Result<Vec<Buffer>, LaunchError> {
    let Some(Expert { held: Held::Parts(first), .. }) = experts.first() else { return Ok(Vec::new()) };
    let lengths: Vec<usize> = first.iter().map(Vec::len).collect();
    let mut buffers = Vec::new();
    for length in &lengths {
        buffers.push(Buffer::zeroed(device, length * experts.len())?);
    }
    for (index, expert) in experts.iter_mut().enumerate() {
        let Held::Parts(parts) = &mut expert.held else { continue };
        for ((part, buffer), length) in parts.drain(..).zip(&mut buffers).zip(&lengths) {
            LaunchError::check_shape("the bytes of an expert's part", part.len(), *length)?;
            buffer.write(index * length, &part)?;
        }
    }
    if device.backend() == Some(Backend::Metal) {
        let (hidden, intermediate) = (experts[0].hidden, experts[0].intermediate);
        buffers.push(pack_metal::places_of(device, experts.len(), hidden, intermediate)?);
    }
    Ok(buffers)
}

/// Where the matrices lie in an expert's buffer, in bytes: w1, w3, w2.
struct Layout {
    codes: [usize; 3],
    scales: [usize; 3],
    total: usize,
}

impl Layout {
    const fn of(hidden: usize, intermediate: usize) -> Layout {
        let up_codes = intermediate * code_stride(hidden);
        let down_codes = hidden * code_stride(intermediate);
        let scales = intermediate * (hidden / GROUP);
        let end = 2 * up_codes + down_codes;
        Layout {
            codes: [0, up_codes, 2 * up_codes],
            scales: [end, end + scales, end + 2 * scales],
            total: end + 3 * scales,
        }
    }
}

/// One row from the checkpoint's nibble order to layout B. `packed` is zero and holds whole pieces.
fn pack_row(packed: &mut [u8], row: &[u8]) {
    let (pieces, rest) = row.as_chunks::<PIECE_BYTES>();
    let (packed, _) = packed.as_chunks_mut::<PIECE_BYTES>();
    for (packed, piece) in packed.iter_mut().zip(pieces) {
        *packed = pack_piece(piece);
    }
    if !rest.is_empty() {
        let mut piece = [0; PIECE_BYTES];
        piece[..rest.len()].copy_from_slice(rest);
        packed[pieces.len()] = pack_piece(&piece);
    }
}

/// 128 codes. Byte `8 n + j` of the source holds nibble `n` of lanes `2 j` and `2 j + 1`; the loops are in the order that
/// compiles to vectors, since an expert has millions of codes.
fn pack_piece(piece: &[u8; PIECE_BYTES]) -> [u8; PIECE_BYTES] {
    let (mut even, mut odd) = ([0u32; 8], [0u32; 8]);
    for (nibble, bytes) in piece.as_chunks::<8>().0.iter().enumerate() {
        for j in 0..8 {
            even[j] |= u32::from(bytes[j] & 15) << (4 * nibble);
            odd[j] |= u32::from(bytes[j] >> 4) << (4 * nibble);
        }
    }
    let mut packed = [0; PIECE_BYTES];
    for (pair, (even, odd)) in packed.as_chunks_mut::<8>().0.iter_mut().zip(even.into_iter().zip(odd)) {
        *pair = (u64::from(even) | u64::from(odd) << 32).to_le_bytes();
    }
    packed
}

fn unpack_row(packed: &[u8], columns: usize) -> impl Iterator<Item = u8> + '_ {
    let code = |column: usize| {
        let (at, shift) = place(column);
        (packed[at] >> shift) & 15
    };
    (0..columns / 2).map(move |index| code(2 * index) | code(2 * index + 1) << 4)
}

/// Byte and shift of a column in a row of layout B.
fn place(column: usize) -> (usize, usize) {
    let (piece, nibble, lane) = (column / PIECE, column % PIECE / 16, column % 16);
    (piece * PIECE_BYTES + lane * 4 + nibble / 2, 4 * (nibble % 2))
}
