//! Compiles every CUDA source for every architecture with a pinned NVRTC, on a machine without a GPU, and reads back
//! what the compiler says of each kernel: registers, shared memory, stack. A spill or a breached limit fails.
//!
//! Cubins go to `target/cubins/`, compressed and named after their sources' key; a build with the `cuda` feature embeds those
//! whose key is that of its own sources. They are never committed.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, bail};

use crate::check::root;
use crate::ptx;

#[path = "../../crates/kernels/cubin_key.rs"]
mod cubin_key;
use cubin_key::resources;

/// One version for everything that ships: register counts and SASS belong to it.
const WHEELS: &[&str] = &[
    "nvidia-cuda-nvrtc==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-cuda-crt==13.0.88",
];

/// The architecture whose kernels are measured: none may spill. Elsewhere a few bytes between the loops are let pass.
const MEASURED: &str = "90a";
const SPILL_BYTES_MAX: u64 = 32;

/// Compiler target, most shared bytes of a block (opted in), registers of a multiprocessor.
pub const ARCHITECTURES: &[(&str, u64, u64)] = &[
    ("80", 163 << 10, 65_536),
    ("86", 99 << 10, 65_536),
    ("89", 99 << 10, 65_536),
    ("90a", 227 << 10, 65_536),
    ("100a", 227 << 10, 65_536),
    ("103a", 227 << 10, 65_536),
    ("120a", 99 << 10, 65_536),
    ("121a", 99 << 10, 65_536),
];

/// Begins the lines of a log that say what is wrong with a kernel's wait for the launch before it.
const UNWAITED: &str = "wait: ";

type Program = *mut c_void;

/// The NVRTC calls that are needed, bound by name so that a build needs no CUDA.
struct Nvrtc {
    library: libloading::Library,
    /// NVRTC asks for it by name on its first compilation, and finds it where it is loaded already.
    _builtins: libloading::os::unix::Library,
}

macro_rules! call {
    ($self:ident, $name:literal, ($($kind:ty),*), ($($value:expr),*)) => {{
        // SAFETY: the signature is NVRTC's own for this name, and every pointer lives across the call.
        let code = unsafe {
            let function: libloading::Symbol<unsafe extern "C" fn($($kind),*) -> c_int> =
                $self.library.get(concat!($name, "\0").as_bytes())?;
            function($($value),*)
        };
        if code == 0 { Ok(()) } else { Err(anyhow::anyhow!("{} answered {code}", $name)) }
    }};
}

/// A compiled source and what the compiler wrote about it.
struct Compiled {
    cubin: Vec<u8>,
    log: String,
}

impl Nvrtc {
    fn load(folder: &Path) -> Result<Self> {
        let (now, global) = (libloading::os::unix::RTLD_NOW, libloading::os::unix::RTLD_GLOBAL);
        let path = folder.join("nvidia/cu13/lib/libnvrtc-builtins.so.13.0");
        // SAFETY: as below.
        let builtins = unsafe { libloading::os::unix::Library::open(Some(&path), now | global) };
        let builtins = builtins.with_context(|| format!("{}", path.display()))?;
        let path = folder.join("nvidia/cu13/lib/libnvrtc.so.13");
        // SAFETY: loading NVIDIA's library runs its initialisers, which do not touch this process otherwise.
        let library = unsafe { libloading::Library::new(&path) }.with_context(|| format!("{}", path.display()))?;
        Ok(Nvrtc { library, _builtins: builtins })
    }

    fn compile(&self, source: &Path, architecture: &str, include: &Path) -> Result<Compiled> {
        let text = CString::new(fs::read_to_string(source)?)?;
        let name = CString::new(source.file_name().context("a source has a name")?.to_string_lossy().as_bytes())?;
        let mut program: Program = std::ptr::null_mut();
        call!(
            self,
            "nvrtcCreateProgram",
            (*mut Program, *const c_char, *const c_char, c_int, *const c_void, *const c_void),
            (&mut program, text.as_ptr(), name.as_ptr(), 0, std::ptr::null(), std::ptr::null())
        )?;
        let shared = root().join("crates/kernels/src/shared");
        let options: Vec<CString> = [
            format!("--gpu-architecture=sm_{architecture}"),
            "--std=c++17".into(),
            "--fmad=false".into(),
            "--device-as-default-execution-space".into(),
            "--ptxas-options=-v".into(),
            "--ptxas-options=-warn-spills".into(),
            format!("--include-path={}", shared.display()),
            format!("--include-path={}", include.display()),
            format!("--include-path={}/cccl", include.display()),
        ]
        .into_iter()
        .map(CString::new)
        .collect::<std::result::Result<_, _>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let done = call!(
            self,
            "nvrtcCompileProgram",
            (Program, c_int, *const *const c_char),
            (program, pointers.len() as c_int, pointers.as_ptr())
        );
        let mut length = 0_usize;
        call!(self, "nvrtcGetProgramLogSize", (Program, *mut usize), (program, &mut length))?;
        let mut log = vec![0_u8; length.max(1)];
        call!(self, "nvrtcGetProgramLog", (Program, *mut c_char), (program, log.as_mut_ptr().cast()))?;
        let mut log =
            CStr::from_bytes_until_nul(&log).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default();
        if let Err(error) = done {
            bail!("{} for sm_{architecture}: {error}\n{log}", source.display());
        }
        call!(self, "nvrtcGetCUBINSize", (Program, *mut usize), (program, &mut length))?;
        let mut cubin = vec![0_u8; length];
        call!(self, "nvrtcGetCUBIN", (Program, *mut c_char), (program, cubin.as_mut_ptr().cast()))?;
        call!(self, "nvrtcGetPTXSize", (Program, *mut usize), (program, &mut length))?;
        let mut ptx = vec![0_u8; length];
        call!(self, "nvrtcGetPTX", (Program, *mut c_char), (program, ptx.as_mut_ptr().cast()))?;
        call!(self, "nvrtcDestroyProgram", (*mut Program), (&mut program))?;
        for problem in ptx::problems(&String::from_utf8_lossy(&ptx)) {
            log.push_str(&format!("{UNWAITED}{problem}\n"));
        }
        Ok(Compiled { cubin, log })
    }
}

/// Every CUDA source below the kernel families, by program.
pub fn sources() -> Result<Vec<(String, PathBuf)>> {
    Ok(cubin_key::sources(&root().join("crates/kernels/src"))?)
}

/// Folder of the wheels; fetched with pip on first use.
fn wheels() -> Result<PathBuf> {
    let folder = root().join("target/nvrtc");
    if folder.join("nvidia/cu13/lib/libnvrtc.so.13").is_file() {
        return Ok(folder);
    }
    let status = Command::new("python3")
        .args(["-m", "pip", "install", "--quiet", "--no-deps", "--target"])
        .arg(&folder)
        .args(WHEELS)
        .status()
        .context("python3 -m pip is used as the download client for NVRTC")?;
    if !status.success() {
        bail!("pip could not fetch {}", WHEELS.join(" "));
    }
    Ok(folder)
}

/// Why this can't run here.
pub fn missing() -> Option<String> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Some("NVRTC's wheels are used on x86-64 Linux".to_string());
    }
    let pip = Command::new("python3").args(["-m", "pip", "--version"]).output();
    if !pip.is_ok_and(|out| out.status.success()) {
        return Some("python3 -m pip is missing: it fetches the pinned NVRTC".to_string());
    }
    None
}

/// One source for one architecture, and what the compiler said of it.
struct Job<'a> {
    program: &'a str,
    source: &'a Path,
    architecture: &'static str,
    /// The compressed cubin, beside which the compiler's log lies.
    cubin: PathBuf,
}

impl Job<'_> {
    fn log(&self) -> PathBuf {
        self.cubin.with_extension("log")
    }

    /// The compiler's log; what an earlier run made of the same sources counts.
    fn run(&self, nvrtc: &Nvrtc, include: &Path) -> Result<String> {
        if self.cubin.is_file()
            && let Ok(log) = fs::read_to_string(self.log())
        {
            return Ok(log);
        }
        let compiled = nvrtc.compile(self.source, self.architecture, include)?;
        fs::write(self.log(), &compiled.log)?;
        fs::write(&self.cubin, miniz_oxide::deflate::compress_to_vec_zlib(&compiled.cubin, 8))?;
        Ok(compiled.log)
    }
}

/// Compiles all, for the wanted architectures or for every one, prints one line a kernel for sm_90a, and fails on a spill or
/// a breached limit.
pub fn run(wanted: &[String]) -> Result<()> {
    let chosen = |name: &str| wanted.is_empty() || wanted.iter().any(|wanted| wanted == name);
    if let Some(unknown) = wanted.iter().find(|wanted| ARCHITECTURES.iter().all(|(name, ..)| name != wanted)) {
        let known: Vec<&str> = ARCHITECTURES.iter().map(|(name, ..)| *name).collect();
        bail!("no architecture is called {unknown}; known are {}", known.join(", "));
    }
    let sources = sources()?;
    if sources.is_empty() {
        bail!("there is no CUDA source");
    }
    let folder = wheels()?;
    let nvrtc = Nvrtc::load(&folder)?;
    let include = folder.join("nvidia/cu13/include");
    let out = root().join("target/cubins");
    fs::create_dir_all(&out)?;
    let includes = cubin_key::includes(&root().join("crates/kernels/src"))?;
    let mut jobs = Vec::new();
    for (program, source) in &sources {
        let key = cubin_key::key(&includes, &fs::read_to_string(source)?);
        for (architecture, ..) in ARCHITECTURES.iter().filter(|(name, ..)| chosen(name)) {
            let cubin = out.join(format!("{program}.sm_{architecture}.{key}.cubin.z"));
            jobs.push(Job { program, source, architecture, cubin });
        }
    }
    let logs = compile_all(&jobs, &nvrtc, &include)?;
    if wanted.is_empty() {
        remove_old(&out, &jobs)?;
    }
    let (mut kernels, mut problems) = (0, Vec::new());
    for (job, log) in jobs.iter().zip(logs) {
        kernels += judge(job, &log, &mut problems);
    }
    println!("{} sources, {kernels} kernels over {} architectures", sources.len(), jobs.len() / sources.len());
    if !problems.is_empty() {
        bail!("{}", problems.join("\n"));
    }
    Ok(())
}

/// Every job's log, the jobs dealt to a thread a core.
fn compile_all(jobs: &[Job<'_>], nvrtc: &Nvrtc, include: &Path) -> Result<Vec<String>> {
    let next = AtomicUsize::new(0);
    let logs: Vec<Mutex<Option<Result<String>>>> = jobs.iter().map(|_| Mutex::new(None)).collect();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((job, log)) = {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    jobs.get(index).zip(logs.get(index))
                } {
                    *log.lock().unwrap_or_else(PoisonError::into_inner) = Some(job.run(nvrtc, include));
                }
            });
        }
    });
    let taken = |log: Mutex<Option<Result<String>>>| log.into_inner().unwrap_or_else(PoisonError::into_inner);
    logs.into_iter().map(|log| taken(log).context("every job has run")?).collect()
}

/// Removes what earlier sources left behind.
fn remove_old(folder: &Path, jobs: &[Job<'_>]) -> Result<()> {
    let current: BTreeSet<PathBuf> = jobs.iter().flat_map(|job| [job.cubin.clone(), job.log()]).collect();
    for file in fs::read_dir(folder)? {
        let path = file?.path();
        if !current.contains(&path) {
            fs::remove_file(&path)?;
        }
    }
    Ok(())
}

/// Holds the kernels of one log to the architecture's limits; returns how many there are.
fn judge(job: &Job<'_>, log: &str, problems: &mut Vec<String>) -> usize {
    let Job { program, architecture, .. } = job;
    let found = resources(log);
    if found.is_empty() {
        problems.push(format!("{program} for sm_{architecture}: the log names no kernel"));
    }
    let unwaited = log.lines().filter_map(|line| line.strip_prefix(UNWAITED));
    problems.extend(unwaited.map(|problem| format!("{program} for sm_{architecture}: {problem}")));
    let limits = ARCHITECTURES.iter().find(|(name, ..)| name == architecture);
    let (shared_max, registers_max) = limits.map_or((0, 0), |(_, shared, registers)| (*shared, *registers));
    for (kernel, figures) in &found {
        if *architecture == MEASURED {
            println!(
                "{program}/{kernel}: {} registers, {} shared bytes, {} stack bytes",
                figures.registers, figures.shared_bytes, figures.stack_bytes
            );
        }
        let let_pass = if *architecture == MEASURED { 0 } else { SPILL_BYTES_MAX };
        if figures.stack_bytes > let_pass || figures.spill_bytes > let_pass {
            problems.push(format!("{kernel} for sm_{architecture} spills: {figures:?}"));
        }
        if figures.shared_bytes > shared_max {
            problems.push(format!("{kernel} for sm_{architecture}: more than {shared_max} shared bytes"));
        }
        if figures.registers * 32 > registers_max {
            problems.push(format!("{kernel} for sm_{architecture}: one warp needs too many registers"));
        }
    }
    found.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cubin_key::Resources;

    #[test]
    fn a_spill_in_the_compilers_log_is_seen() {
        let log = "ptxas info    : Compiling entry function 'gemv' for 'sm_90a'\n\
                   ptxas info    : Function properties for gemv\n\
                   \x20   16 bytes stack frame, 24 bytes spill stores, 24 bytes spill loads\n\
                   ptxas info    : Used 40 registers, used 1 barriers, 16 bytes cumulative stack size, 2048 bytes smem\n";
        let found = resources(log);
        let expected = Resources { registers: 40, stack_bytes: 16, spill_bytes: 24, shared_bytes: 2048 };
        assert_eq!(found.get("gemv"), Some(&expected));
    }
}
