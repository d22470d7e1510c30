//! Where a run's launches go: the CPU with its instruction sets and threads, or a GPU with its ways to cut and order a launch.

use crate::edits::Ahead;
use crate::options::Backend;
use crate::probe::Setting;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use tf_device::{Device, Queue, gpu};
use tf_kernels::contract::{ALL_ROWS, Case, Contract, Control, Fill, Gate, Plant};
use tf_numerics::lanes::Level;

/// Locked by the process whose turn it is.
const TURN: &str = "tensorfold-contract-turn";

/// What the launches of a device asked for that some chip refuses.
pub type Problems = Arc<dyn Fn() -> Vec<String> + Send + Sync>;
/// A device for a control, and what its launches ask for.
pub type Changed = (Device, Problems);

/// Whether kernels of tensor cores take a case's values: packing refuses scales with which codes aren't exact in bf16.
pub(crate) fn tensor_cores_take(case: &Case) -> bool {
    case.sizes.iter().all(|(name, _)| *name != "smallest scale")
}

/// What a GPU brings to the contract.
pub trait Bench: Send + Sync {
    /// Its name in the report.
    fn name(&self) -> String;

    /// Devices that must give the same bits: the first checks the most, the others cut and order launches in other ways.
    fn devices(&self) -> &[(&'static str, Device)];

    /// A device that runs an edited source, for controls.
    ///
    /// # Errors
    /// Why it can't.
    fn edited(&self, source: &'static str, text: String) -> Result<Changed, String>;

    /// A device whose launches have so many SIMD groups a threadgroup, for controls; `None` where each is cut to what the
    /// chip takes.
    fn crowded(&self, _simdgroups: u32) -> Option<Result<Changed, String>> {
        None
    }

    /// What can be compiled before kernels are proved.
    fn ahead(&self, _contracts: &[&Contract]) -> Ahead {
        Ahead::default()
    }

    /// Where what was compiled lies.
    fn folder(&self) -> Option<&Path> {
        None
    }

    /// Whether [`Bench::edited`] can work here at all.
    ///
    /// # Errors
    /// What is missing; the controls are skipped then.
    fn can_edit(&self) -> Result<(), String> {
        Ok(())
    }

    /// Whether the device takes a case's values.
    fn takes(&self, _case: &Case) -> bool {
        true
    }

    /// Whether an error of a launch says that the device has found a defect: how some planted edits show.
    fn is_defect(&self, error: &str) -> bool;

    /// Whether a kernel's bits are those of the CPU: where the declared order is the same.
    fn has_cpu_bits(&self, kernel: &str) -> bool;

    /// Rows of a case that are launched, at most: an emulator is slow.
    fn rows_max(&self) -> usize;

    /// The largest size of a case that all gates run.
    fn size_max(&self) -> usize;

    /// What the launches so far asked for that some chip refuses, launches that failed for it included.
    fn limit_problems(&self) -> Vec<String>;
}

/// Where launches run.
#[derive(Clone, Default)]
pub enum Target {
    #[default]
    Cpu,
    Gpu(Arc<dyn Bench>),
}

impl Target {
    /// Whose controls run.
    pub fn backend(&self) -> Backend {
        match self {
            Target::Cpu => Backend::Cpu,
            Target::Gpu(bench) => match bench.devices()[0].1.backend() {
                Some(gpu::Backend::Metal) => Backend::Metal,
                Some(gpu::Backend::Cuda) => Backend::Cuda,
                None => Backend::Cpu,
            },
        }
    }

    /// What a GPU is called.
    pub fn device_name(&self) -> Option<String> {
        match self {
            Target::Cpu => None,
            Target::Gpu(bench) => Some(bench.name()),
        }
    }

    /// Whether a control is one of this target.
    pub fn runs(&self, control: &Control) -> bool {
        match control.plant {
            Plant::Edit { backend, .. } => match self {
                Target::Cpu => false,
                Target::Gpu(bench) => bench.devices()[0].1.backend() == Some(backend),
            },
            Plant::Simdgroups(count) => match self {
                Target::Cpu => false,
                Target::Gpu(bench) => bench.crowded(count).is_some(),
            },
            Plant::Arguments | Plant::Outcome(_) => true,
        }
    }

    /// Whether a gate runs a case with the seed of this index: a slow device judges the values of a large case once.
    pub fn takes(&self, case: &Case, gate: Gate, seed: usize) -> bool {
        let largest = case.sizes.iter().map(|(_, size)| *size).max().unwrap_or(0);
        match self {
            Target::Cpu => true,
            Target::Gpu(bench) => {
                bench.takes(case) && (largest <= bench.size_max() || (gate == Gate::Value && seed == 0))
            }
        }
    }

    /// Rows of a case that the gates choose among.
    pub fn rows(&self, case: &Case) -> usize {
        match self {
            Target::Cpu => case.rows,
            Target::Gpu(_) if case.sizes.contains(&ALL_ROWS) => case.rows,
            Target::Gpu(bench) => case.rows.min(bench.rows_max()),
        }
    }

    /// The launch that others are compared with.
    pub fn plain(&self) -> Setting {
        Setting::plain()
    }

    /// The ways of gate 2.
    pub fn settings(&self) -> Vec<Setting> {
        const THREADS_MAX: usize = 3;
        match self {
            Target::Cpu => {
                let levels = Level::available().into_iter();
                let each = |level| (1..=THREADS_MAX).map(move |threads| Setting { level, threads, fill: Fill::NAN });
                levels.flat_map(each).collect()
            }
            // The first device's bits are the base's.
            Target::Gpu(bench) => {
                let others = if bench.devices().len() > 1 { 2 } else { 1 };
                (others..=bench.devices().len()).map(|threads| Setting { threads, ..Setting::plain() }).collect()
            }
        }
    }

    /// The ways of gate 3: on a GPU the device that checks the most.
    pub fn careful(&self) -> Vec<Setting> {
        match self {
            Target::Cpu => {
                let levels = Level::available().into_iter();
                levels.map(|level| Setting { level, threads: 2, fill: Fill::NAN }).collect()
            }
            Target::Gpu(_) => vec![Setting::plain()],
        }
    }

    /// Two ways of gate 4, whose launches alternate.
    pub fn pair(&self) -> [Setting; 2] {
        let second = match self {
            Target::Cpu => 2,
            Target::Gpu(bench) => bench.devices().len().min(2),
        };
        [Setting { threads: second, ..Setting::plain() }, Setting::plain()]
    }

    /// A queue for a setting.
    pub fn queue(&self, setting: Setting) -> Queue {
        match self {
            Target::Cpu => Queue::cpu(setting.threads, setting.level),
            Target::Gpu(bench) => match &bench.devices()[setting.threads - 1].1 {
                Device::Gpu(device) => Queue::gpu(device),
                Device::Cpu(_) => Queue::cpu(1, setting.level),
            },
        }
    }

    /// How a message names a setting.
    pub fn name(&self, setting: Setting) -> String {
        match self {
            Target::Cpu => format!("{}, {} threads", setting.level, setting.threads),
            Target::Gpu(bench) => bench.devices()[setting.threads - 1].0.to_owned(),
        }
    }

    /// See [`Bench::can_edit`].
    ///
    /// # Errors
    /// What is missing.
    pub fn can_edit(&self) -> Result<(), String> {
        match self {
            Target::Cpu => Ok(()),
            Target::Gpu(bench) => bench.can_edit(),
        }
    }

    /// Waits until no other process proves or watches kernels on a CUDA device: a GPU that several share is dealt out in slices
    /// of time, and launches that are waited for one by one then take many times as long. The turn ends with the value.
    pub fn turn(&self) -> Option<File> {
        if self.backend() != Backend::Cuda {
            return None;
        }
        // Without a place for the file nobody waits, which costs time alone.
        let file = File::create(std::env::temp_dir().join(TURN)).ok()?;
        file.lock().ok()?;
        Some(file)
    }

    /// See [`Bench::ahead`].
    pub fn ahead(&self, contracts: &[&Contract]) -> Ahead {
        match self {
            Target::Cpu => Ahead::default(),
            Target::Gpu(bench) => bench.ahead(contracts),
        }
    }

    /// See [`Bench::folder`].
    pub fn folder(&self) -> Option<&Path> {
        match self {
            Target::Cpu => None,
            Target::Gpu(bench) => bench.folder(),
        }
    }

    /// Whether it still answers: a fault in a CUDA kernel ends the device for its whole process.
    pub fn is_alive(&self) -> bool {
        match self {
            Target::Cpu => true,
            Target::Gpu(_) => self.queue(self.plain()).finish().is_ok(),
        }
    }

    /// This target with one source edited.
    ///
    /// # Errors
    /// Why there is no such device.
    pub fn edited(&self, source: &'static str, text: String) -> Result<Target, String> {
        match self {
            Target::Cpu => Err("edits of source text run on their own backend".to_owned()),
            Target::Gpu(bench) => Ok(Edited::of(bench, bench.edited(source, text)?)),
        }
    }

    /// See [`Bench::crowded`].
    ///
    /// # Errors
    /// Why there is no such device.
    pub fn crowded(&self, simdgroups: u32) -> Result<Target, String> {
        let Target::Gpu(bench) = self else { return Err("the CPU has no threadgroups".to_owned()) };
        let device = bench.crowded(simdgroups).ok_or("this device cuts a launch to what it takes")?;
        Ok(Edited::of(bench, device?))
    }

    /// See [`Bench::is_defect`].
    pub fn is_defect(&self, error: &str) -> bool {
        match self {
            Target::Cpu => false,
            Target::Gpu(bench) => bench.is_defect(error),
        }
    }

    /// See [`Bench::has_cpu_bits`].
    pub fn has_cpu_bits(&self, kernel: &str) -> bool {
        match self {
            Target::Cpu => false,
            Target::Gpu(bench) => bench.has_cpu_bits(kernel),
        }
    }

    /// See [`Bench::limit_problems`].
    pub fn limit_problems(&self) -> Vec<String> {
        match self {
            Target::Cpu => Vec::new(),
            Target::Gpu(bench) => bench.limit_problems(),
        }
    }
}

/// A bench whose one device runs an edited source, or launches of another geometry.
struct Edited {
    bench: Arc<dyn Bench>,
    devices: [(&'static str, Device); 1],
    problems: Problems,
}

impl Edited {
    fn of(bench: &Arc<dyn Bench>, (device, problems): Changed) -> Target {
        Target::Gpu(Arc::new(Edited { bench: bench.clone(), devices: [("edited", device)], problems }))
    }
}

impl Bench for Edited {
    fn name(&self) -> String {
        self.bench.name()
    }
    fn devices(&self) -> &[(&'static str, Device)] {
        &self.devices
    }
    fn edited(&self, source: &'static str, text: String) -> Result<Changed, String> {
        self.bench.edited(source, text)
    }
    fn folder(&self) -> Option<&Path> {
        self.bench.folder()
    }
    fn is_defect(&self, error: &str) -> bool {
        self.bench.is_defect(error)
    }
    fn has_cpu_bits(&self, kernel: &str) -> bool {
        self.bench.has_cpu_bits(kernel)
    }
    fn rows_max(&self) -> usize {
        self.bench.rows_max()
    }
    fn size_max(&self) -> usize {
        self.bench.size_max()
    }
    fn limit_problems(&self) -> Vec<String> {
        (self.problems)()
    }
}
