//! Runs a launch under several schedules and compares what they leave.

use crate::chips::{CHIPS, Chip, LimitError};
use crate::compile::Program;
use libloading::Library;
use std::ffi::c_void;

/// What a buffer index of a kernel is bound to.
pub enum Argument<'a> {
    Read(&'a [u8]),
    /// Read and written in place.
    Write(&'a mut [u8]),
}

/// One launch: argument `i` is `[[buffer(i)]]`.
pub struct Launch<'a> {
    pub kernel: &'a str,
    pub arguments: Vec<Argument<'a>>,
    /// Threadgroups of the grid.
    pub grid: [u32; 3],
    /// Threads of a threadgroup.
    pub threads: [u32; 3],
    /// Bytes of `[[threadgroup(i)]]`.
    pub threadgroup: Vec<u64>,
    /// Function constants by index, as their bytes.
    pub constants: Vec<(u32, Vec<u8>)>,
}

/// In which order the fibers that may run are taken; threadgroups follow the same order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Forward,
    Reverse,
    Random(u64),
}

/// One way to run a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    pub order: Order,
    /// Checks every access.
    pub checked: bool,
}

/// What [`Program::run`] does, the checks first because their messages say more.
pub const SCHEDULES: [Schedule; 4] = [
    Schedule { order: Order::Forward, checked: true },
    Schedule { order: Order::Reverse, checked: false },
    Schedule { order: Order::Random(0x5eed), checked: false },
    Schedule { order: Order::Random(0xfeed), checked: false },
];

/// Threadgroup memory is filled with another NaN for each schedule, so that a value that depends on it differs.
const POISONS: [u32; 4] = [0x7fc5_a5a5, 0xffd2_3c3c, 0x7fe9_9669, 0xfff4_c3c3];

/// Why a launch has no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RunError {
    #[error("{name} has no kernel {kernel}")]
    NoKernel { name: String, kernel: String },
    #[error("{kernel} binds buffer {index}, the launch gives {given}")]
    Arguments { kernel: String, index: u32, given: usize },
    #[error("{kernel} may write buffer {index}, the launch gives it as read-only")]
    ReadOnly { kernel: String, index: u32 },
    #[error("{kernel}: function constant {index} {what}")]
    Constant { kernel: String, index: u32, what: String },
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// With the arrays that the kernel declares, as far as they were reached.
    #[error("{kernel}: {text}")]
    Memory { kernel: String, found: u64, text: String },
    #[error("{kernel}, {schedule:?}: {text}")]
    Defect { kernel: String, schedule: Schedule, text: String },
    #[error(
        "{kernel}: byte {byte} of buffer {buffer} is {first} after {a:?} and {second} after {b:?}: the result depends on the order"
    )]
    Order { kernel: String, buffer: usize, byte: usize, first: u8, second: u8, a: Schedule, b: Schedule },
}

/// What a launch took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    pub threadgroup_bytes: u64,
    /// Of the last schedule.
    pub switches: u64,
}

/// Mirrors `Request` of `runtime.cpp`.
#[repr(C)]
struct Request {
    entry: unsafe extern "C" fn(),
    grid: [u32; 3],
    threads: [u32; 3],
    order: u32,
    poison: u32,
    seed: u64,
    threadgroup_bytes_max: u64,
    argument_bytes: [u64; 31],
    switches: u64,
    threadgroup_bytes: u64,
    error: [u8; 512],
}

impl Program {
    /// Runs `launch` under every schedule of [`SCHEDULES`] from the same inputs and leaves the common result in its buffers.
    /// Checked against every chip of [`CHIPS`].
    ///
    /// # Errors
    /// The first defect found; the buffers are then as before.
    pub fn run(&self, launch: &mut Launch<'_>) -> Result<Report, RunError> {
        self.run_on(launch, &CHIPS, &SCHEDULES)
    }

    /// As [`Program::run`], for the given chips and schedules.
    ///
    /// # Errors
    /// As [`Program::run`].
    pub fn run_on(&self, launch: &mut Launch<'_>, chips: &[Chip], schedules: &[Schedule]) -> Result<Report, RunError> {
        let kernel = launch.kernel.to_string();
        let Some(entry) = self.entries.iter().find(|entry| entry.name == kernel) else {
            return Err(RunError::NoKernel { name: self.name.clone(), kernel });
        };
        for &(index, writes) in &entry.buffers {
            match launch.arguments.get(index as usize) {
                None => return Err(RunError::Arguments { kernel, index, given: launch.arguments.len() }),
                Some(Argument::Read(_)) if writes => return Err(RunError::ReadOnly { kernel, index }),
                Some(_) => {}
            }
        }
        self.check_constants(launch)?;
        let threads = launch.threads.iter().map(|&n| u64::from(n)).product::<u64>();
        let buffers = launch.arguments.len() as u64;
        for chip in chips {
            chip.check(&kernel, threads, launch.threadgroup.iter().sum(), buffers)?;
        }
        assert!(threads <= 1024, "the runtime's tables hold 1024 threads");
        assert!(buffers <= 31, "the runtime's tables hold 31 buffers");
        let bytes_max = chips.iter().map(|chip| chip.threadgroup_bytes_max).min().unwrap_or(32 << 10);
        let mut report = Report { threadgroup_bytes: 0, switches: 0 };
        let mut first: Option<Outputs> = None;
        // Nothing is compared with the inputs' copies then, and no access looked at.
        let in_place = matches!(schedules, [only] if !only.checked);
        for (&schedule, poison) in schedules.iter().zip(POISONS.iter().cycle()) {
            let plain = || self.plain.as_ref().expect("a program built for checks is run with checks");
            let library = if schedule.checked { &self.checked } else { plain() };
            let library = library.lock().expect("a run that panicked left the runtime in an unknown state");
            self.set_constants(&library, launch);
            let (outputs, seen) = execute(&library, launch, in_place, schedule, *poison, bytes_max)?;
            report = seen;
            let Some(first) = &first else {
                first = Some(outputs);
                continue;
            };
            for (buffer, (one, other)) in first.iter().zip(&outputs).enumerate() {
                let (Some(one), Some(other)) = (one, other) else { continue };
                if let Some(byte) = (0..one.len()).find(|&i| one[i] != other[i]) {
                    let (a, b) = (schedules[0], schedule);
                    return Err(RunError::Order { kernel, buffer, byte, first: one[byte], second: other[byte], a, b });
                }
            }
        }
        for (argument, output) in launch.arguments.iter_mut().zip(first.unwrap_or_default()) {
            if let (Argument::Write(bytes), Some(output)) = (argument, output) {
                bytes.copy_from_slice(&output);
            }
        }
        Ok(report)
    }
}

impl Program {
    /// Every constant is given as declared, unless the source asks whether it is.
    fn check_constants(&self, launch: &Launch<'_>) -> Result<(), RunError> {
        let wrong = |index, what| RunError::Constant { kernel: launch.kernel.to_string(), index, what };
        for constant in &self.constants {
            let (name, bytes) = (&constant.name, constant.bytes);
            match launch.constants.iter().find(|(index, _)| *index == constant.index) {
                None if constant.may_miss => {}
                None => return Err(wrong(constant.index, format!("({name}) has no value"))),
                Some((index, value)) if value.len() != bytes => {
                    return Err(wrong(*index, format!("({name}) has {bytes} bytes, and {} were given", value.len())));
                }
                Some(_) => {}
            }
        }
        let unknown = |index: &u32| self.constants.iter().all(|constant| constant.index != *index);
        match launch.constants.iter().find(|(index, _)| unknown(index)) {
            Some((index, _)) => Err(wrong(*index, "is none of the source's".into())),
            None => Ok(()),
        }
    }

    fn set_constants(&self, library: &Library, launch: &Launch<'_>) {
        for constant in &self.constants {
            let symbol = format!("tf_constant_{}", constant.index);
            let value = launch.constants.iter().find(|(index, _)| *index == constant.index);
            let value = value.map_or(std::ptr::null(), |(_, value)| value.as_ptr());
            // SAFETY: the generated code has this signature and copies as many bytes as were checked to be there.
            unsafe {
                let set = library.get::<unsafe extern "C" fn(*const u8)>(symbol.as_bytes());
                set.expect("a library exports its constants")(value);
            }
        }
    }
}

type Outputs = Vec<Option<Vec<u8>>>;

/// Shorter inputs are copied between guards also where they could be read in place.
const IN_PLACE_BYTES_MIN: usize = 4096;

/// With `in_place` large inputs are read where they are. Outputs always lie between guards.
fn execute(
    library: &Library,
    launch: &Launch<'_>,
    in_place: bool,
    schedule: Schedule,
    poison: u32,
    threadgroup_bytes_max: u64,
) -> Result<(Outputs, Report), RunError> {
    let symbol = format!("tf_entry_{}", launch.kernel);
    // SAFETY: these are the signatures that runtime.cpp and the generated entry points have.
    let (entry, reset, map, bind, dispatch) = unsafe {
        let missing = "every library of this crate exports these";
        (
            *library.get::<unsafe extern "C" fn()>(symbol.as_bytes()).expect(missing),
            *library.get::<unsafe extern "C" fn()>(b"tf_reset").expect(missing),
            *library.get::<unsafe extern "C" fn(u32, u64, i32) -> *mut c_void>(b"tf_map").expect(missing),
            *library.get::<unsafe extern "C" fn(u32, *const u8, u64)>(b"tf_bind").expect(missing),
            *library.get::<unsafe extern "C" fn(*mut Request) -> i32>(b"tf_dispatch").expect(missing),
        )
    };
    let mut mapped = Vec::new();
    // SAFETY: the caller holds the library's lock, so nobody else uses its runtime.
    unsafe { reset() };
    for (index, argument) in launch.arguments.iter().enumerate() {
        let (bytes, writable): (&[u8], bool) = match argument {
            Argument::Read(bytes) => (bytes, false),
            Argument::Write(bytes) => (bytes, true),
        };
        let is_large = bytes.len() >= IN_PLACE_BYTES_MIN && bytes.as_ptr().addr().is_multiple_of(16);
        if in_place && !writable && is_large {
            // SAFETY: the slice outlives the launch, and the caller has checked that the kernel declares it as read-only.
            unsafe { bind(index as u32, bytes.as_ptr(), bytes.len() as u64) };
            mapped.push(std::ptr::null_mut());
            continue;
        }
        // SAFETY: the runtime returns that many bytes of its own, valid until the next reset.
        unsafe {
            let to = map(index as u32, bytes.len() as u64, i32::from(writable)).cast::<u8>();
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
            mapped.push(to);
        }
    }
    let (order, seed) = match schedule.order {
        Order::Forward => (0, 0),
        Order::Reverse => (1, 0),
        Order::Random(seed) => (2, seed),
    };
    let mut argument_bytes = [0; 31];
    argument_bytes[..launch.threadgroup.len()].copy_from_slice(&launch.threadgroup);
    let mut request = Request {
        entry,
        grid: launch.grid,
        threads: launch.threads,
        order,
        poison,
        seed,
        threadgroup_bytes_max,
        argument_bytes,
        switches: 0,
        threadgroup_bytes: 0,
        error: [0; 512],
    };
    let any = launch.grid.iter().chain(&launch.threads).all(|&n| n > 0);
    // SAFETY: the request outlives the call; threads are at most the chip's limit, which the runtime's tables hold.
    if any && unsafe { dispatch(&mut request) } != 0 {
        let end = request.error.iter().position(|&byte| byte == 0).unwrap_or(request.error.len());
        let text = String::from_utf8_lossy(&request.error[..end]).into_owned();
        let (kernel, found) = (launch.kernel.into(), request.threadgroup_bytes);
        return Err(match found > threadgroup_bytes_max {
            true => RunError::Memory { kernel, found, text },
            false => RunError::Defect { kernel, schedule, text },
        });
    }
    let outputs = launch.arguments.iter().zip(mapped).map(|(argument, from)| match argument {
        Argument::Read(_) => None,
        Argument::Write(bytes) => {
            let mut copy = vec![0; bytes.len()];
            // SAFETY: the mapping holds as many bytes and no fiber runs any more.
            unsafe { std::ptr::copy_nonoverlapping(from, copy.as_mut_ptr(), copy.len()) };
            Some(copy)
        }
    });
    let report = Report { threadgroup_bytes: request.threadgroup_bytes, switches: request.switches };
    Ok((outputs.collect(), report))
}
