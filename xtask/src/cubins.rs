//! Compiles every CUDA source for every architecture with a pinned NVRTC, on a machine without a GPU, and reads back
//! what the compiler says of each kernel: registers, shared memory, stack. A spill or a breached limit fails.
//!
//! Cubins go to `target/cubins/`, from where a build with the `cuda` feature embeds them; they are never committed.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::check::root;

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
        let log = CStr::from_bytes_until_nul(&log).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default();
        if let Err(error) = done {
            bail!("{} for sm_{architecture}: {error}\n{log}", source.display());
        }
        call!(self, "nvrtcGetCUBINSize", (Program, *mut usize), (program, &mut length))?;
        let mut cubin = vec![0_u8; length];
        call!(self, "nvrtcGetCUBIN", (Program, *mut c_char), (program, cubin.as_mut_ptr().cast()))?;
        call!(self, "nvrtcDestroyProgram", (*mut Program), (&mut program))?;
        Ok(Compiled { cubin, log })
    }
}

/// What the compiler says of one kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    pub registers: u64,
    pub stack_bytes: u64,
    pub spill_bytes: u64,
    pub shared_bytes: u64,
}

/// Reads the compiler's log: a line names the kernel, later lines give its figures.
pub fn resources(log: &str) -> BTreeMap<String, Resources> {
    fn before(line: &str, word: &str) -> Option<u64> {
        let head = &line[..line.find(word)?];
        head.split(|c: char| !c.is_ascii_digit()).rfind(|part| !part.is_empty())?.parse().ok()
    }
    let mut kernels: BTreeMap<String, Resources> = BTreeMap::new();
    let mut current = None;
    for line in log.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            current = rest.split('\'').next().map(str::to_string);
        }
        let Some(name) = &current else { continue };
        let kernel = kernels.entry(name.clone()).or_default();
        if let Some(bytes) = before(line, " bytes stack frame") {
            kernel.stack_bytes = bytes;
            kernel.spill_bytes = before(line, " bytes spill stores").unwrap_or(0);
        }
        if line.contains("Used ") {
            kernel.registers = before(line, " registers").unwrap_or(0);
            kernel.shared_bytes = before(line, " bytes smem").unwrap_or(0);
        }
    }
    kernels
}

/// Every CUDA source below the kernel families.
pub fn sources() -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for family in fs::read_dir(root().join("crates/kernels/src"))? {
        let family = family?.path();
        if !family.is_dir() {
            continue;
        }
        for file in fs::read_dir(&family)? {
            let file = file?.path();
            if file.extension().is_some_and(|extension| extension == "cu") {
                found.push(file);
            }
        }
    }
    found.sort();
    Ok(found)
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

/// Compiles all, prints one line a kernel for sm_90a, and fails on a spill or a breached limit.
pub fn run() -> Result<()> {
    let sources = sources()?;
    if sources.is_empty() {
        bail!("there is no CUDA source");
    }
    let folder = wheels()?;
    let nvrtc = Nvrtc::load(&folder)?;
    let include = folder.join("nvidia/cu13/include");
    let out = root().join("target/cubins");
    fs::create_dir_all(&out)?;
    let (mut kernels, mut problems) = (0, Vec::new());
    for source in &sources {
        let family = source.parent().and_then(Path::file_name).context("a source lies in a family")?.to_string_lossy();
        let stem = source.file_stem().context("a source has a stem")?.to_string_lossy();
        for (architecture, shared_max, registers_max) in ARCHITECTURES {
            let compiled = nvrtc.compile(source, architecture, &include)?;
            fs::write(out.join(format!("{family}.{stem}.sm_{architecture}.cubin")), &compiled.cubin)?;
            let found = resources(&compiled.log);
            if found.is_empty() {
                problems.push(format!("{family}/{stem} for sm_{architecture}: the log names no kernel"));
            }
            for (kernel, figures) in found {
                kernels += 1;
                if *architecture == "90a" {
                    println!(
                        "{family}/{kernel}: {} registers, {} shared bytes, {} stack bytes",
                        figures.registers, figures.shared_bytes, figures.stack_bytes
                    );
                }
                let let_pass = if *architecture == MEASURED { 0 } else { SPILL_BYTES_MAX };
                if figures.stack_bytes > let_pass || figures.spill_bytes > let_pass {
                    problems.push(format!("{kernel} for sm_{architecture} spills: {figures:?}"));
                }
                if figures.shared_bytes > *shared_max {
                    problems.push(format!("{kernel} for sm_{architecture}: more than {shared_max} shared bytes"));
                }
                if figures.registers * 32 > *registers_max {
                    problems.push(format!("{kernel} for sm_{architecture}: one warp needs too many registers"));
                }
            }
        }
    }
    println!("{} sources, {kernels} kernels over {} architectures", sources.len(), ARCHITECTURES.len());
    if !problems.is_empty() {
        bail!("{}", problems.join("\n"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

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
