//! Compiles a source into two libraries, plain and checked, and loads them.

use crate::cuda;
use crate::prepass::{self, Entry, FunctionConstant, Pass, PrepassError, Translated};
use libloading::Library;
use std::collections::HashMap;
use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

pub const COMPILER: &str = "clang++-19";
/// What to do where it is missing.
pub const INSTALL: &str = "apt-get install -y clang-19";

const STDLIB: &str = include_str!("../include/metal_stdlib");
const CUDA_SHIM: &str = include_str!("../include/cuda_shim.h");
const TENSOR_STEP: &str = include_str!("../include/tensor_step.h");
const RUNTIME_HEADER: &str = include_str!("../include/runtime.h");
const RUNTIME: &str = include_str!("../include/runtime.cpp");

// No contraction: a fused multiply-add is one because the source says so. No vectorisation: an access stays one access.
const FLAGS: &[&str] = &[
    "-std=c++17",
    "-O2",
    "-march=native",
    "-ffp-contract=off",
    // Halves round at every operation, as on the device.
    "-Xclang",
    "-ffloat16-excess-precision=none",
    "-Xclang",
    "-fbfloat16-excess-precision=none",
    "-fno-vectorize",
    "-fno-slp-vectorize",
    "-fno-exceptions",
    "-fno-rtti",
    "-fvisibility=hidden",
    "-fPIC",
    "-Wall",
    "-Werror",
    "-Wconditional-uninitialized",
    "-Wno-unused-function",
    "-Wno-unused-const-variable",
    "-Wno-unused-variable",
    "-Wno-unknown-attributes",
    "-Wno-duplicate-decl-specifier",
    "-Wno-unknown-pragmas",
];

/// Why a source is not a program.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    #[error("{COMPILER} is missing; {INSTALL}")]
    NoCompiler,
    #[error("{name}: {error}")]
    Prepass { name: String, error: PrepassError },
    #[error("{name}: {stage} refused the source:\n{text}")]
    Compiler { name: String, stage: &'static str, text: String },
    #[error("{path}: {error}")]
    File { path: PathBuf, error: std::io::Error },
    #[error("{path} can't be loaded: {error}")]
    Load { path: PathBuf, error: libloading::Error },
}

/// Whether the compiler is installed.
pub fn compiler_found() -> bool {
    Command::new(COMPILER).arg("--version").output().is_ok_and(|out| out.status.success())
}

/// A loaded source.
pub struct Program {
    pub entries: Vec<Entry>,
    /// What its function constants are.
    pub constants: Vec<FunctionConstant>,
    pub(crate) name: String,
    pub(crate) plain: Option<Loaded>,
    pub(crate) checked: Loaded,
}

/// A library, whose runtime has one state: one launch at a time, whichever program made of its text asks for it.
pub(crate) type Loaded = Arc<Mutex<Library>>;

/// Which libraries are made of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Libraries {
    Both,
    /// For a source that is to be found wrong: half the compiler's work, and no look at its address spaces.
    Checked,
}

impl Program {
    /// Lints, compiles and loads `source`, which may include the texts of `includes` by name. Libraries are kept in `out`
    /// under a name that depends on everything that enters them.
    ///
    /// # Errors
    /// See [`BuildError`].
    pub fn build(name: &str, source: &str, includes: &[(&str, &str)], out: &Path) -> Result<Program, BuildError> {
        let prepass_error = |error| BuildError::Prepass { name: name.into(), error };
        let expanded = prepass::expand(name, source, includes).map_err(prepass_error)?;
        let run = prepass::translate(&expanded, Pass::Run).map_err(prepass_error)?;
        let lint = prepass::translate(&expanded, Pass::Lint).map_err(prepass_error)?;
        Program::of(name, run, Some(&lint.text), Libraries::Both, out)
    }

    /// As [`Program::build`], for schedules that check.
    ///
    /// # Errors
    /// See [`BuildError`].
    pub fn build_checked(
        name: &str,
        source: &str,
        includes: &[(&str, &str)],
        out: &Path,
    ) -> Result<Program, BuildError> {
        let prepass_error = |error| BuildError::Prepass { name: name.into(), error };
        let expanded = prepass::expand(name, source, includes).map_err(prepass_error)?;
        let run = prepass::translate(&expanded, Pass::Run).map_err(prepass_error)?;
        Program::of(name, run, None, Libraries::Checked, out)
    }

    /// As [`Program::build`], for a CUDA source without inline PTX; see [`cuda`].
    ///
    /// # Errors
    /// See [`BuildError`].
    pub fn build_cuda(name: &str, source: &str, includes: &[(&str, &str)], out: &Path) -> Result<Program, BuildError> {
        let prepass_error = |error| BuildError::Prepass { name: name.into(), error };
        let expanded = prepass::expand(name, source, includes).map_err(prepass_error)?;
        Program::of(name, cuda::translate(&expanded).map_err(prepass_error)?, None, Libraries::Both, out)
    }

    fn of(
        name: &str,
        run: Translated,
        lint: Option<&str>,
        which: Libraries,
        out: &Path,
    ) -> Result<Program, BuildError> {
        let mut hasher = DefaultHasher::new();
        (&run.text, &lint, which == Libraries::Both, STDLIB, CUDA_SHIM, TENSOR_STEP, RUNTIME_HEADER, RUNTIME, FLAGS)
            .hash(&mut hasher);
        let folder = out.join(format!("metal-{:016x}", hasher.finish()));
        let (plain, checked) = (folder.join("plain.so"), folder.join("checked.so"));
        if !checked.exists() {
            if !compiler_found() {
                return Err(BuildError::NoCompiler);
            }
            let mut hasher = DefaultHasher::new();
            (RUNTIME_HEADER, RUNTIME, FLAGS).hash(&mut hasher);
            let runtime = out.join(format!("metal-runtime-{:016x}.o", hasher.finish()));
            let plain = (which == Libraries::Both).then_some(plain.as_path());
            compile(name, &folder, &runtime, &run.text, lint, plain, &checked)?;
        }
        Ok(Program {
            entries: run.entries,
            constants: run.constants,
            name: name.into(),
            plain: if which == Libraries::Both { Some(load(&plain)?) } else { None },
            checked: load(&checked)?,
        })
    }
}

fn write(path: &Path, text: &str) -> Result<(), BuildError> {
    fs::write(path, text).map_err(|error| BuildError::File { path: path.into(), error })
}

fn compile(
    name: &str,
    folder: &Path,
    runtime: &Path,
    run: &str,
    lint: Option<&str>,
    plain: Option<&Path>,
    checked: &Path,
) -> Result<(), BuildError> {
    // A name of this process's own, so that two test programs may build the same source at once.
    let stage = folder.with_extension(format!("building-{}-{:?}", std::process::id(), std::thread::current().id()));
    fs::create_dir_all(&stage).map_err(|error| BuildError::File { path: stage.clone(), error })?;
    for (file, text) in [
        ("metal_stdlib", STDLIB),
        ("cuda_shim.h", CUDA_SHIM),
        ("tensor_step.h", TENSOR_STEP),
        ("runtime.h", RUNTIME_HEADER),
        ("runtime.cpp", RUNTIME),
        ("run.cpp", run),
        ("lint.cpp", lint.unwrap_or_default()),
    ] {
        write(&stage.join(file), text)?;
    }
    let clang = |what: &'static str, arguments: &[&str]| {
        let out = Command::new(COMPILER).current_dir(&stage).args(FLAGS).arg("-I.").args(arguments).output();
        let out = out.map_err(|error| BuildError::File { path: COMPILER.into(), error })?;
        if out.status.success() {
            return Ok(());
        }
        Err(BuildError::Compiler {
            name: name.into(),
            stage: what,
            text: String::from_utf8_lossy(&out.stderr).into_owned(),
        })
    };
    // Address spaces are types in Metal; CUDA has none.
    let check_spaces = || clang("the address-space check", &["-DMSL_LINT", "-fsyntax-only", "lint.cpp"]);
    let result = lint
        .map_or(Ok(()), |_| check_spaces())
        .and_then(|()| {
            // The same for every source.
            if !runtime.exists() {
                clang("the compiler", &["-c", "runtime.cpp", "-o", "new.o"])?;
                fs::rename(stage.join("new.o"), runtime)
                    .map_err(|error| BuildError::File { path: runtime.into(), error })?;
            }
            fs::copy(runtime, stage.join("runtime.o"))
                .map_err(|error| BuildError::File { path: runtime.into(), error })?;
            Ok(())
        })
        .and_then(|()| match plain {
            Some(_) => clang("the compiler", &["-shared", "-Wl,-Bsymbolic", "run.cpp", "runtime.o", "-o", "plain.so"]),
            None => Ok(()),
        })
        .and_then(|()| {
            let sanitised = ["-fsanitize=thread", "-mllvm", "-tsan-instrument-func-entry-exit=0"];
            clang("the compiler", &[&sanitised[..], &["-c", "run.cpp", "-o", "run.o"]].concat())
        })
        .and_then(|()| clang("the linker", &["-shared", "-Wl,-Bsymbolic", "run.o", "runtime.o", "-o", "checked.so"]));
    let moved = result.and_then(|()| {
        fs::create_dir_all(folder).map_err(|error| BuildError::File { path: folder.into(), error })?;
        for library in plain.into_iter().chain([checked]) {
            let from = stage.join(library.file_name().expect("the caller names files"));
            fs::rename(&from, library).map_err(|error| BuildError::File { path: library.into(), error })?;
        }
        Ok(())
    });
    let _ = fs::remove_dir_all(&stage);
    moved
}

/// The library of a file, loaded once a process: the system gives every later load of it the same state. It is never
/// unloaded, since its signal handler stays installed.
fn load(path: &Path) -> Result<Loaded, BuildError> {
    static LIBRARIES: LazyLock<Mutex<HashMap<PathBuf, Loaded>>> = LazyLock::new(Mutex::default);
    let path = path.canonicalize().map_err(|error| BuildError::File { path: path.into(), error })?;
    let mut libraries = LIBRARIES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(library) = libraries.get(&path) {
        return Ok(library.clone());
    }
    // SAFETY: the library was built from the runtime of this crate, which has no initialisers.
    let library = unsafe { Library::new(&path) }.map_err(|error| BuildError::Load { path: path.clone(), error })?;
    let library = Arc::new(Mutex::new(library));
    libraries.insert(path, library.clone());
    Ok(library)
}
