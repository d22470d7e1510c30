//! Device memory, wherever it is.

use crate::cpu::CpuBuffer;
use crate::gpu::{GpuBuffer, GpuDevice, Plain, bytes_of};
use crate::{Device, Element, HostBytes, LaunchError};

/// Device memory of a fixed length in bytes, zero at first.
#[derive(Debug)]
pub enum Buffer {
    Cpu(CpuBuffer),
    Gpu(GpuBuffer),
}

impl Buffer {
    /// `bytes` zero bytes, aligned to 64. Large buffers of the CPU take physical memory only where they are written.
    ///
    /// # Errors
    /// [`LaunchError::Memory`] or [`LaunchError::DeviceMemory`] when the system refuses.
    pub fn zeroed(device: &Device, bytes: usize) -> Result<Buffer, LaunchError> {
        match device {
            Device::Cpu(_) => Ok(Buffer::Cpu(CpuBuffer::zeroed(bytes)?)),
            Device::Gpu(device) => Ok(Buffer::Gpu(GpuBuffer::zeroed(device, bytes)?)),
        }
    }

    /// A buffer of `count` zero elements of `T`.
    ///
    /// # Errors
    /// As [`Buffer::zeroed`].
    pub fn zeroed_of<T: Element>(device: &Device, count: usize) -> Result<Buffer, LaunchError> {
        let bytes = count.checked_mul(size_of::<T>()).ok_or(LaunchError::Memory { bytes: usize::MAX })?;
        Buffer::zeroed(device, bytes)
    }

    /// A copy of `values` on the device.
    ///
    /// # Errors
    /// As [`Buffer::zeroed`].
    pub fn from_slice<T: Element>(device: &Device, values: &[T]) -> Result<Buffer, LaunchError> {
        let mut buffer = Buffer::zeroed(device, size_of_val(values))?;
        match &mut buffer {
            Buffer::Cpu(buffer) => buffer.view_mut().copy_from_slice(values),
            Buffer::Gpu(buffer) => buffer.driver().write(buffer.span(0, size_of_val(values)), bytes_of(values))?,
        }
        Ok(buffer)
    }

    /// Host bytes on the device, as they are: without a copy where device and bytes allow it, and then not to be written.
    /// `element_bytes`: of what kernels read there.
    ///
    /// # Errors
    /// As [`Buffer::zeroed`].
    pub fn from_host(device: &Device, host: &HostBytes<'_>, element_bytes: usize) -> Result<Buffer, LaunchError> {
        if let Device::Gpu(gpu) = device
            && let Some(buffer) = GpuBuffer::mapped(gpu, host, element_bytes)?
        {
            return Ok(Buffer::Gpu(buffer));
        }
        Buffer::from_slice(device, host.bytes())
    }

    /// A second buffer with the same bytes, on the same device and without guards.
    ///
    /// # Errors
    /// As [`Buffer::zeroed`].
    pub fn duplicate(&self) -> Result<Buffer, LaunchError> {
        let mut copy = Buffer::zeroed(&self.device(), self.len_bytes())?;
        match (self, &mut copy) {
            (Buffer::Cpu(from), Buffer::Cpu(to)) => to.view_mut::<u8>().copy_from_slice(from.view()),
            (Buffer::Gpu(from), Buffer::Gpu(to)) if from.len_bytes() > 0 => {
                from.driver().copy(from.span(0, from.len_bytes()), to.span(0, from.len_bytes()))?;
            }
            (Buffer::Cpu(_) | Buffer::Gpu(_), _) => {}
        }
        Ok(copy)
    }

    /// `bytes` zero bytes between two watched guards: what the kernel contract hands to a launch.
    ///
    /// # Errors
    /// As [`Buffer::zeroed`].
    pub fn guarded(device: &Device, bytes: usize, pattern: u8) -> Result<Buffer, LaunchError> {
        match device {
            Device::Cpu(_) => Ok(Buffer::Cpu(CpuBuffer::guarded(bytes, pattern)?)),
            Device::Gpu(device) => Ok(Buffer::Gpu(GpuBuffer::guarded(device, bytes, pattern)?)),
        }
    }

    /// Where a guard was overwritten, counted in bytes from the buffer's first; see [`Buffer::guarded`].
    pub fn guard_damage(&self) -> Option<isize> {
        match self {
            Buffer::Cpu(buffer) => buffer.guard_damage(),
            Buffer::Gpu(buffer) => buffer.guard_damage(),
        }
    }

    /// As [`CpuBuffer::break_guard`].
    pub fn break_guard(&mut self, before: bool) {
        match self {
            Buffer::Cpu(buffer) => buffer.break_guard(before),
            Buffer::Gpu(buffer) => buffer.break_guard(before),
        }
    }

    /// Whose memory it is.
    pub fn device(&self) -> Device {
        match self {
            Buffer::Cpu(_) => Device::cpu(),
            Buffer::Gpu(buffer) => Device::Gpu(GpuDevice::new(buffer.driver().clone())),
        }
    }

    /// Bytes of the buffer, without guards.
    pub fn len_bytes(&self) -> usize {
        match self {
            Buffer::Cpu(buffer) => buffer.len_bytes(),
            Buffer::Gpu(buffer) => buffer.len_bytes(),
        }
    }

    /// How many whole elements of `T` the buffer holds.
    pub fn len_of<T: Element>(&self) -> usize {
        self.len_bytes() / size_of::<T>()
    }

    /// The whole buffer as elements of `T`, where the host can see it: what a GPU's buffer holds is not known to it.
    ///
    /// # Panics
    /// As [`Buffer::view`] on the CPU.
    pub fn host<T: Element>(&self) -> Option<&[T]> {
        match self {
            Buffer::Cpu(buffer) => Some(buffer.view()),
            Buffer::Gpu(_) => None,
        }
    }

    /// A copy of the whole buffer, from any device; waits for everything launched before.
    ///
    /// # Errors
    /// [`LaunchError::Device`].
    pub fn to_vec<T: Element + Default>(&self) -> Result<Vec<T>, LaunchError> {
        let mut values = vec![T::default(); self.len_of::<T>()];
        self.read(0, &mut values)?;
        Ok(values)
    }

    /// Copies elements from `first` on, counted in elements of `T`; waits for everything launched before.
    ///
    /// # Errors
    /// [`LaunchError::Device`].
    ///
    /// # Panics
    /// When the range is beyond the buffer.
    pub fn read<T: Element>(&self, first: usize, to: &mut [T]) -> Result<(), LaunchError> {
        match self {
            Buffer::Cpu(buffer) => to.copy_from_slice(&buffer.view()[first..first + to.len()]),
            Buffer::Gpu(buffer) => {
                let span = buffer.span(first * size_of::<T>(), size_of_val(to));
                buffer.driver().read(span, bytes_of_mut(to))?;
            }
        }
        Ok(())
    }

    /// Overwrites elements from `first` on, after everything launched before.
    ///
    /// # Errors
    /// [`LaunchError::Device`].
    ///
    /// # Panics
    /// When the range is beyond the buffer.
    pub fn write<T: Element>(&mut self, first: usize, from: &[T]) -> Result<(), LaunchError> {
        match self {
            Buffer::Cpu(buffer) => buffer.view_mut()[first..first + from.len()].copy_from_slice(from),
            Buffer::Gpu(buffer) => {
                let span = buffer.span_mut(first * size_of::<T>(), size_of_val(from));
                buffer.driver().write(span, bytes_of(from))?;
            }
        }
        Ok(())
    }

    /// The whole buffer as elements of `T`. Of the CPU only.
    ///
    /// # Panics
    /// When the length in bytes is no multiple of `T`'s size: the buffer was made for another type. On a GPU.
    pub fn view<T: Element>(&self) -> &[T] {
        match self {
            Buffer::Cpu(buffer) => buffer.view(),
            Buffer::Gpu(_) => no_view(),
        }
    }

    /// As [`Buffer::view`], for writing.
    pub fn view_mut<T: Element>(&mut self) -> &mut [T] {
        match self {
            Buffer::Cpu(buffer) => buffer.view_mut(),
            Buffer::Gpu(_) => no_view(),
        }
    }
}

#[cold]
fn no_view() -> ! {
    panic!("a host view of a GPU's buffer: use Queue::read and Queue::write")
}

/// The bytes of elements, to be overwritten: any bytes are elements.
fn bytes_of_mut<T: Element + Plain>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: an element has no padding and is valid for every bit pattern; bytes need no alignment.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

macro_rules! named_views {
    ($($name:ident $name_mut:ident $element:ty),* $(,)?) => {
        /// The views by name; each is [`Buffer::view`] or [`Buffer::view_mut`] of that type.
        impl Buffer {
            $(
                pub fn $name(&self) -> &[$element] {
                    self.view()
                }
                pub fn $name_mut(&mut self) -> &mut [$element] {
                    self.view_mut()
                }
            )*
        }
    };
}
named_views!(f32 f32_mut f32, u8 u8_mut u8, u16 u16_mut u16, u32 u32_mut u32, u64 u64_mut u64, i32 i32_mut i32, i64 i64_mut i64);
