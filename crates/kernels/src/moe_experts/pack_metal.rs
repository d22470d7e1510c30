//! The experts as Metal reads them: the release's bytes as they are, in the file where they lie or gathered from it, and a
//! table of where each tensor starts.

use super::ExpertBytes;
use super::pack::{GROUP, check_tensors};
use crate::pack::PackError;
use tf_device::gpu::GpuBuffer;
use tf_device::{Buffer, Device, HostBytes, LaunchError};

/// Tensors of an expert, as the table counts them: codes of w1, w3 and w2, then their scales.
const TENSORS: usize = 6;

fn tensors<'a>(expert: &ExpertBytes<'a>) -> [&'a [u8]; TENSORS] {
    [expert.w1, expert.w3, expert.w2, expert.w1_scale, expert.w3_scale, expert.w2_scale]
}

/// Bytes of one expert.
pub(super) const fn expert_bytes(hidden: usize, intermediate: usize) -> usize {
    3 * (hidden * intermediate / 2 + hidden * intermediate / GROUP)
}

/// One expert's tensors, one after the other.
pub(super) fn gather(expert: ExpertBytes<'_>, hidden: usize, intermediate: usize) -> Result<Vec<u8>, PackError> {
    check_tensors(expert, hidden, intermediate)?;
    Ok(tensors(&expert).concat())
}

/// The table `[experts, 6]` for `count` gathered experts, one after the other.
pub(super) fn places_of(
    device: &Device,
    count: usize,
    hidden: usize,
    intermediate: usize,
) -> Result<Buffer, LaunchError> {
    let (codes, scales) = (hidden * intermediate / 2, hidden * intermediate / GROUP);
    let starts = [0, codes, 2 * codes, 3 * codes, 3 * codes + scales, 3 * codes + 2 * scales];
    let each = expert_bytes(hidden, intermediate);
    let places = (0..count).flat_map(|expert| starts.map(|start| (expert * each + start) as u64));
    table(device, &places.collect::<Vec<u64>>())
}

fn table(device: &Device, places: &[u64]) -> Result<Buffer, LaunchError> {
    Buffer::from_slice(device, places)
}

/// Bytes that hold all experts, without a copy, and the table of them. `None` where the device needs a copy or a tensor lies
/// elsewhere.
pub(super) fn in_place(
    device: &Device,
    span: &HostBytes<'_>,
    experts: &[ExpertBytes<'_>],
    hidden: usize,
    intermediate: usize,
) -> Result<Option<[Buffer; 2]>, PackError> {
    let Device::Gpu(gpu) = device else { return Ok(None) };
    let (start, end) = (span.bytes().as_ptr().addr(), span.bytes().as_ptr_range().end.addr());
    let mut places = Vec::with_capacity(TENSORS * experts.len());
    for expert in experts {
        check_tensors(*expert, hidden, intermediate)?;
        for tensor in tensors(expert) {
            let range = tensor.as_ptr_range();
            if range.start.addr() < start || range.end.addr() > end {
                return Ok(None);
            }
            places.push((range.start.addr() - start) as u64);
        }
    }
    let Some(mapped) = GpuBuffer::mapped(gpu, span, 1)? else { return Ok(None) };
    Ok(Some([Buffer::Gpu(mapped), table(device, &places)?]))
}
