//! Memory that one launch uses and the next overwrites.

use super::CpuBuffer;
use crate::LaunchError;

/// Grows to the largest launch and stays, so that launches in the steady state allocate nothing.
///
/// A launch finds whatever the last one left: it must write before it reads.
#[derive(Debug, Default)]
pub struct Scratch {
    values: Option<CpuBuffer>,
    indices: Option<CpuBuffer>,
}

impl Scratch {
    /// `count` floats with any content, aligned to 64 bytes.
    ///
    /// # Errors
    /// [`LaunchError::Memory`] when there is no room to grow.
    pub fn values(&mut self, count: usize) -> Result<&mut [f32], LaunchError> {
        Ok(&mut grown(&mut self.values, count)?.view_mut()[..count])
    }

    /// `value_count` floats and `index_count` integers with any content, each aligned to 64 bytes.
    ///
    /// # Errors
    /// [`LaunchError::Memory`] when there is no room to grow.
    pub fn values_and_indices(
        &mut self,
        value_count: usize,
        index_count: usize,
    ) -> Result<(&mut [f32], &mut [u32]), LaunchError> {
        let values = &mut grown(&mut self.values, value_count)?.view_mut()[..value_count];
        let indices = &mut grown(&mut self.indices, index_count)?.view_mut()[..index_count];
        Ok((values, indices))
    }
}

/// The buffer, replaced by a larger one where it holds fewer than `count` four-byte elements.
fn grown(buffer: &mut Option<CpuBuffer>, count: usize) -> Result<&mut CpuBuffer, LaunchError> {
    const FIRST_BYTES: usize = 1 << 16;
    let bytes = count.checked_mul(4).ok_or(LaunchError::Memory { bytes: usize::MAX })?;
    let held = buffer.as_ref().map_or(0, CpuBuffer::len_bytes);
    if buffer.is_none() || held < bytes {
        let larger = bytes.max(held.saturating_mul(3) / 2).max(FIRST_BYTES);
        *buffer = Some(CpuBuffer::zeroed(larger.next_multiple_of(64))?);
    }
    Ok(buffer.as_mut().expect("it was made above"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_and_then_stays() {
        let mut scratch = Scratch::default();
        assert_eq!(scratch.values(0).unwrap().len(), 0);
        let (values, indices) = scratch.values_and_indices(100_000, 7).unwrap();
        assert_eq!((values.len(), indices.len()), (100_000, 7));
        let start = values.as_ptr();
        for count in [1, 50_000, 100_000] {
            let values = scratch.values(count).unwrap();
            assert_eq!(values.len(), count);
            assert_eq!(values.as_ptr(), start, "{count} floats need no new memory");
        }
        assert_eq!(scratch.values(usize::MAX), Err(LaunchError::Memory { bytes: usize::MAX }));
    }
}
