//! The emulator as a device: a whole model runs on it as on a Mac, and the CUDA kernels that it can run as on their GPU.

use crate::chips::{CHIPS, Chip};
use crate::compile::{BuildError, Program, compiler_found};
use crate::cuda;
use crate::prepass::Item;
use crate::run::{self, Order, RunError, SCHEDULES, Schedule};
use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, OnceLock};
use tf_device::gpu::{self, Argument, Backend, Block, Call, Driver, GpuDevice, GpuLimits, Span};
use tf_device::{Device, HostBytes, LaunchError};

/// Of every block, as on the device.
const ALIGNMENT: usize = 256;

/// How the launches of a device run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rigour {
    /// One order, no check of every access: for whole models, whose kernels are proven elsewhere.
    Once,
    /// Every schedule of [`SCHEDULES`].
    Proven,
}

/// A device with memory of its own whose launches run once. Programs are compiled once a process.
///
/// # Errors
/// [`BuildError::NoCompiler`].
pub fn device() -> Result<Device, BuildError> {
    device_with(Rigour::Once)
}

/// As [`device`], with a choice.
///
/// # Errors
/// As [`device`].
pub fn device_with(rigour: Rigour) -> Result<Device, BuildError> {
    emulated(Backend::Metal, Settings::of(rigour), &CHIPS)
}

/// A device with every choice made: what the kernel contract holds against each other.
///
/// # Errors
/// As [`device`].
pub fn device_of(settings: Settings) -> Result<Device, BuildError> {
    emulated(Backend::Metal, settings, &CHIPS)
}

/// How a device runs its launches.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Each launch runs under all of them, from the same memory to the same bytes.
    pub schedules: &'static [Schedule],
    /// SIMD groups of a threadgroup instead of those that a launch asks for; the grid still has as many of them, or as many
    /// threadgroups where a threadgroup is one item.
    pub simdgroups: Option<u32>,
    /// A text, a kernel's own or one that it includes, and what stands in its place. Its programs are built with checks only.
    pub edit: Option<(&'static str, String)>,
    pub log: Option<Log>,
}

impl Settings {
    fn of(rigour: Rigour) -> Settings {
        const ONCE: &[Schedule] = &[Schedule { order: Order::Forward, checked: false }];
        let schedules = if rigour == Rigour::Once { ONCE } else { &SCHEDULES };
        Settings { schedules, simdgroups: None, edit: None, log: None }
    }
}

/// What a launch asked of the chip.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Launched {
    pub entry: &'static str,
    pub threads: u32,
    /// Declared and asked for.
    pub threadgroup_bytes: u32,
    pub buffers: u32,
    /// Of the constants, which are set without a buffer.
    pub argument_bytes: u32,
}

/// The launches of some devices, each kind once; also those that were too much for a chip.
#[derive(Clone, Debug, Default)]
pub struct Log(Arc<Mutex<BTreeSet<Launched>>>);

impl Log {
    /// What was launched so far.
    pub fn launches(&self) -> Vec<Launched> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).iter().cloned().collect()
    }

    fn note(&self, launched: Launched) {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).insert(launched);
    }
}

/// Whether the text of a launch's error says that the emulator has found a defect of the kernel.
pub fn is_defect(error: &str) -> bool {
    const WORDS: [&str; 4] =
        ["Schedule {", "the result depends on the order", "; choose another geometry", ": threadgroup memory: "];
    WORDS.iter().any(|words| error.contains(words))
}

/// A device that runs the families' `kernel.cu`, read from the sources beside this crate.
///
/// # Errors
/// As [`device`].
pub fn cuda_device(rigour: Rigour) -> Result<Device, BuildError> {
    emulated(Backend::Cuda, Settings::of(rigour), &cuda::CHIPS)
}

/// As [`cuda_device`], with the shared memory of an H200: launches that ask for more than other chips have.
///
/// # Errors
/// As [`device`].
pub fn large_cuda_device(rigour: Rigour) -> Result<Device, BuildError> {
    emulated(Backend::Cuda, Settings::of(rigour), &cuda::LARGE_CHIPS)
}

const fn name(backend: Backend) -> &'static str {
    match backend {
        Backend::Metal => "the emulated Metal device",
        Backend::Cuda => "the emulated CUDA device",
    }
}

fn emulated(backend: Backend, settings: Settings, chips: &'static [Chip]) -> Result<Device, BuildError> {
    if !compiler_found() {
        return Err(BuildError::NoCompiler);
    }
    let limits = GpuLimits {
        threads_max: chips.iter().map(|chip| chip.threads_max).min().unwrap_or(0),
        shared_bytes_max: chips.iter().map(|chip| chip.threadgroup_bytes_max as u32).min().unwrap_or(0),
        buffers_max: chips.iter().map(|chip| chip.buffers_max).min().unwrap_or(0),
        units: 8,
        memory_bytes: 1 << 34,
        target: "emulated".into(),
    };
    let driver = Emulated { backend, chips, limits, settings, programs: Mutex::default(), memory: Mutex::default() };
    Ok(Device::Gpu(GpuDevice::new(Arc::new(driver))))
}

struct Emulated {
    backend: Backend,
    chips: &'static [Chip],
    limits: GpuLimits,
    settings: Settings,
    /// Those of an edited source; others are shared by all devices.
    programs: Mutex<Programs>,
    memory: Mutex<Memory>,
}

#[derive(Default)]
struct Memory {
    blocks: HashMap<u64, Vec<u8>>,
    next: u64,
    bytes: u64,
}

impl fmt::Debug for Emulated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(name(self.backend))
    }
}

impl Emulated {
    fn memory(&self) -> std::sync::MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Records what a launch asks for, where somebody wants to know.
    fn note(&self, call: &Call<'_>, threads: u32, threadgroup_bytes: u64) {
        let Some(log) = &self.settings.log else { return };
        log.note(Launched {
            entry: call.entry,
            threads,
            threadgroup_bytes: u32::try_from(threadgroup_bytes).unwrap_or(u32::MAX),
            // The constants are the last.
            buffers: call.arguments.len() as u32 + 1,
            argument_bytes: call.shape.len() as u32,
        });
    }
}

fn failed(text: impl fmt::Display) -> LaunchError {
    LaunchError::Device { device: "the emulated device".into(), text: text.to_string() }
}

impl Memory {
    fn block(&self, block: Block) -> Result<&Vec<u8>, LaunchError> {
        self.blocks.get(&block.0).ok_or_else(|| failed(format_args!("there is no block {}", block.0)))
    }

    fn bytes(&self, span: Span) -> Result<&[u8], LaunchError> {
        Ok(&self.block(span.block)?[span.first..span.first + span.bytes])
    }

    fn bytes_mut(&mut self, span: Span) -> Result<&mut [u8], LaunchError> {
        let block = self.blocks.get_mut(&span.block.0);
        let block = block.ok_or_else(|| failed(format_args!("there is no block {}", span.block.0)))?;
        Ok(&mut block[span.first..span.first + span.bytes])
    }
}

impl Driver for Emulated {
    fn backend(&self) -> Backend {
        self.backend
    }

    fn name(&self) -> &str {
        name(self.backend)
    }

    fn limits(&self) -> &GpuLimits {
        &self.limits
    }

    fn free_bytes(&self) -> Result<u64, LaunchError> {
        Ok(self.limits.memory_bytes.saturating_sub(self.memory().bytes))
    }

    fn allocate(&self, bytes: usize) -> Result<Block, LaunchError> {
        let mut memory = self.memory();
        let total = self.limits.memory_bytes;
        let free = total.saturating_sub(memory.bytes);
        if bytes as u64 > free {
            return Err(LaunchError::DeviceMemory { device: name(self.backend).into(), bytes, free, total });
        }
        memory.next += 1;
        memory.bytes += bytes.next_multiple_of(ALIGNMENT) as u64;
        let block = Block(memory.next);
        memory.blocks.insert(block.0, vec![0; bytes]);
        Ok(block)
    }

    /// As a Mac maps them: behind bytes that are none of the buffer's, at any address that the elements allow.
    fn map(&self, host: &HostBytes<'_>, element_bytes: usize) -> Result<Option<(Block, usize)>, LaunchError> {
        let (bytes, first) = (host.bytes(), host.bytes().as_ptr().addr() % ALIGNMENT);
        let is_kept = host.keeper().is_some() && !bytes.is_empty();
        if self.backend != Backend::Metal || !is_kept || !first.is_multiple_of(element_bytes) {
            return Ok(None);
        }
        let block = self.allocate(first + bytes.len())?;
        let span = Span { block, first: 0, bytes: first + bytes.len() };
        self.write(span, &[&[0xa5; ALIGNMENT][..first], bytes].concat())?;
        Ok(Some((block, first)))
    }

    fn free(&self, block: Block) {
        let mut memory = self.memory();
        let given = memory.blocks.remove(&block.0).map_or(0, |bytes| bytes.len().next_multiple_of(ALIGNMENT));
        memory.bytes -= given as u64;
    }

    fn refused(&self, call: &Call<'_>) {
        self.note(call, call.threads, u64::from(call.shared_bytes));
    }

    fn launch(&self, call: &Call<'_>) -> Result<(), LaunchError> {
        let program = self.program(call.program)?;
        let mut memory = self.memory();
        let outcome = run_call(&program, call, &mut memory, self);
        match outcome? {
            Ok(_) => Ok(()),
            Err(RunError::NoKernel { .. }) => {
                let (program, entry) = (call.program.name, call.entry);
                Err(LaunchError::NoKernel { program, entry, backend: self.backend })
            }
            Err(error) => Err(failed(error)),
        }
    }

    fn copy(&self, from: Span, to: Span) -> Result<(), LaunchError> {
        let mut memory = self.memory();
        if from.block == to.block {
            let block = memory.bytes_mut(Span { first: 0, bytes: from.first.max(to.first) + from.bytes, ..from })?;
            block.copy_within(from.first..from.first + from.bytes, to.first);
            return Ok(());
        }
        let source = memory.bytes(from)?.to_vec();
        memory.bytes_mut(to)?.copy_from_slice(&source);
        Ok(())
    }

    fn zero(&self, span: Span) -> Result<(), LaunchError> {
        self.memory().bytes_mut(span)?.fill(0);
        Ok(())
    }

    fn read(&self, from: Span, to: &mut [u8]) -> Result<(), LaunchError> {
        to.copy_from_slice(self.memory().bytes(from)?);
        Ok(())
    }

    fn write(&self, to: Span, from: &[u8]) -> Result<(), LaunchError> {
        self.memory().bytes_mut(to)?.copy_from_slice(from);
        Ok(())
    }

    fn finish(&self) -> Result<(), LaunchError> {
        Ok(())
    }
}

/// Runs the call on blocks that are taken out of the memory meanwhile where they are written.
fn run_call(
    program: &Program,
    call: &Call<'_>,
    memory: &mut Memory,
    emulated: &Emulated,
) -> Result<Result<run::Report, RunError>, LaunchError> {
    let mut written = Vec::new();
    let mut wrong = None;
    for argument in call.arguments {
        let Argument::Write(span) = argument else { continue };
        let Some(block) = memory.blocks.remove(&span.block.0) else {
            wrong = Some(failed(format_args!("{} is given one buffer to write twice", call.entry)));
            break;
        };
        written.push((*span, block));
    }
    let mut outputs = written.iter_mut();
    let mut arguments = Vec::new();
    for argument in call.arguments {
        arguments.push(match argument {
            Argument::Read(span) => match memory.bytes(*span) {
                Ok(bytes) => run::Argument::Read(bytes),
                Err(_) => {
                    wrong = Some(failed(format_args!("{} is given one buffer to read and to write", call.entry)));
                    run::Argument::Read(&[])
                }
            },
            Argument::Write(_) => match outputs.next() {
                Some((span, block)) => run::Argument::Write(&mut block[span.first..span.first + span.bytes]),
                None => run::Argument::Write(&mut []),
            },
            Argument::Bytes(bytes) => run::Argument::Read(bytes),
            Argument::Missing => run::Argument::Write(&mut []),
        });
    }
    arguments.push(run::Argument::Read(call.shape));
    let (groups, threads) = geometry(program, call, emulated.settings.simdgroups);
    let mut launch = run::Launch {
        kernel: call.entry,
        arguments,
        grid: [groups, 1, 1],
        threads: [threads, 1, 1],
        threadgroup: if call.shared_bytes > 0 { vec![u64::from(call.shared_bytes)] } else { Vec::new() },
        constants: Vec::new(),
    };
    let schedules = emulated.settings.schedules;
    let outcome = if wrong.is_none() { program.run_on(&mut launch, emulated.chips, schedules) } else { Ok(NOTHING) };
    drop(launch);
    for (span, block) in written {
        memory.blocks.insert(span.block.0, block);
    }
    // What is too much for a chip ends the launch and counts all the same.
    let threadgroup_bytes = match &outcome {
        Ok(report) => Some(report.threadgroup_bytes),
        Err(RunError::Limit(_)) => Some(u64::from(call.shared_bytes)),
        Err(RunError::Memory { found, .. }) => Some(*found),
        Err(_) => None,
    };
    if let Some(bytes) = threadgroup_bytes {
        emulated.note(call, threads, bytes);
    }
    wrong.map_or(Ok(outcome), Err)
}

/// Threadgroups and threads of a call, with `simdgroups` SIMD groups a threadgroup where that is asked for.
fn geometry(program: &Program, call: &Call<'_>, simdgroups: Option<u32>) -> (u32, u32) {
    let entry = program.entries.iter().find(|entry| entry.name == call.entry);
    match (simdgroups, entry) {
        (Some(simdgroups), Some(entry)) if entry.item == Item::Threadgroup => (call.groups, 32 * simdgroups),
        (Some(simdgroups), Some(_)) => ((call.groups * call.threads / 32).div_ceil(simdgroups), 32 * simdgroups),
        _ => (call.groups, call.threads),
    }
}

const NOTHING: run::Report = run::Report { threadgroup_bytes: 0, switches: 0 };

type Built = Result<Arc<Program>, String>;
/// By the address of the program, which is a static, and its backend.
type Programs = HashMap<(usize, Backend), Arc<OnceLock<Built>>>;

impl Emulated {
    /// The compiled form of a source, made on first use.
    fn program(&self, program: &'static gpu::Program) -> Result<Arc<Program>, LaunchError> {
        static PROGRAMS: LazyLock<Mutex<Programs>> = LazyLock::new(Mutex::default);
        let concerns = |edited: &str| {
            program.metal == Some(edited) || program.metal_includes.iter().any(|(_, text)| *text == edited)
        };
        let edit = self.settings.edit.as_ref().filter(|(edited, _)| concerns(edited));
        let programs = if edit.is_some() { &self.programs } else { &*PROGRAMS };
        let key = (std::ptr::from_ref(program) as usize, self.backend);
        // Held for the look only: others build meanwhile.
        let slot = programs.lock().unwrap_or_else(std::sync::PoisonError::into_inner).entry(key).or_default().clone();
        let built = slot.get_or_init(|| match (self.backend, edit) {
            (Backend::Cuda, _) => build_cuda(program.name).map(Arc::new),
            (Backend::Metal, edit) => build_metal(program, edit).map(Arc::new),
        });
        built.clone().map_err(failed)
    }
}

fn build_metal(program: &gpu::Program, edit: Option<&(&'static str, String)>) -> Result<Program, String> {
    let name = format!("{}.metal", program.name);
    let source = program.metal.ok_or_else(|| "there is no Metal source".to_string())?;
    let built = match edit {
        None => Program::build(&name, source, program.metal_includes, &folder()),
        Some((edited, text)) => {
            let of = |original| if original == *edited { text.as_str() } else { original };
            let includes: Vec<_> = program.metal_includes.iter().map(|(name, text)| (*name, of(*text))).collect();
            Program::build_checked(&name, of(source), &includes, &folder())
        }
    };
    built.map_err(|error| error.to_string())
}

/// The family's `kernel.cu`, or `stem.cu` where the program is `family.stem`: a program names only its set of cubins.
fn build_cuda(program: &str) -> Result<Program, String> {
    let (family, stem) = program.split_once('.').unwrap_or((program, "kernel"));
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/src");
    let read = |path: PathBuf| std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()));
    let source = read(kernels.join(family).join(format!("{stem}.cu")))?;
    let shared = |name: &str| read(kernels.join("shared").join(name));
    let texts: Vec<(&str, String)> =
        ["prelude.cuh", "step.cuh", "cluster.cuh", "draw.cuh", "wgmma.cuh", "attention.cuh", "attend.cuh"]
            .into_iter()
            .map(|name| Ok((name, shared(name)?)))
            .collect::<Result<_, String>>()?;
    let includes: Vec<(&str, &str)> = texts.iter().map(|(name, text)| (*name, text.as_str())).collect();
    let built = Program::build_cuda(&format!("{program}.cu"), &source, &includes, &folder());
    built.map_err(|error| error.to_string())
}

/// Where libraries are kept: beside the running program, which is a build folder for everything that may use this crate.
fn folder() -> PathBuf {
    let beside = std::env::current_exe().ok().and_then(|path| Some(path.parent()?.join("metal-emulator")));
    beside.unwrap_or_else(|| std::env::temp_dir().join("tensorfold-metal-emulator"))
}
