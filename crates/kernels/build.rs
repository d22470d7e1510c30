//! With the `cuda` feature: the tables of `src/cubins.rs`, the cubins that `cargo xtask cubins` has made of exactly these
//! sources, and the sources themselves.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

#[path = "cubin_key.rs"]
mod cubin_key;

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=cubin_key.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return Ok(());
    }
    println!("cargo::rerun-if-changed=src");
    println!("cargo::rerun-if-env-changed=TENSORFOLD_CUBINS");
    let manifest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let folder = env::var_os("TENSORFOLD_CUBINS").map_or_else(|| manifest.join("../../target/cubins"), PathBuf::from);
    println!("cargo::rerun-if-changed={}", folder.display());
    let families = manifest.join("src");
    let includes = cubin_key::includes(&families)?;
    let sources = cubin_key::sources(&families)?;
    let (mut cubins, mut texts, mut without) = (String::new(), String::new(), Vec::new());
    for (program, path) in &sources {
        let key = cubin_key::key(&includes, &fs::read_to_string(path)?);
        let embedded = embed(&mut cubins, &folder, program, &key)?;
        if embedded == 0 {
            without.push(program.as_str());
        }
        writeln!(texts, "    ({program:?}, include_str!({:?})),", path.display().to_string())
            .map_err(io::Error::other)?;
    }
    if !without.is_empty() {
        println!(
            "cargo::warning=no cubins of these CUDA sources in {} ({}): run `cargo xtask cubins` before a build that is to \
             run without a compiler",
            folder.display(),
            without.join(", ")
        );
    }
    let mut headers = String::new();
    for (name, _) in &includes {
        let path = families.join("shared").join(name);
        writeln!(headers, "    ({name:?}, include_str!({:?})),", path.display().to_string())
            .map_err(io::Error::other)?;
    }
    let tables = format!(
        "static CUBINS: &[Cubin] = &[\n{cubins}];\nstatic SOURCES: &[(&str, &str)] = &[\n{texts}];\n\
         static HEADERS: &[(&str, &str)] = &[\n{headers}];\n"
    );
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default());
    fs::write(out.join("cubins.rs"), tables)
}

/// Lists the compressed cubins of `program` for every target; returns how many there are.
fn embed(cubins: &mut String, folder: &Path, program: &str, key: &str) -> io::Result<usize> {
    let Ok(files) = fs::read_dir(folder) else { return Ok(0) };
    let mut found: Vec<(String, PathBuf)> = Vec::new();
    for file in files {
        let path = file?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let rest = name.strip_prefix(program).and_then(|rest| rest.strip_prefix(".sm_"));
        let target = rest.and_then(|rest| rest.strip_suffix(&format!(".{key}.cubin.z")));
        if let Some(target) = target {
            found.push((target.to_owned(), path));
        }
    }
    found.sort();
    for (target, path) in &found {
        // The compiler's log lies beside the cubin.
        let log = fs::read_to_string(path.with_extension("log")).unwrap_or_default();
        let mut kernels = String::new();
        for (name, figures) in cubin_key::resources(&log) {
            let cubin_key::Resources { registers, stack_bytes, spill_bytes, shared_bytes } = figures;
            write!(
                kernels,
                "Figures {{ kernel: {name:?}, registers: {registers}, stack_bytes: {stack_bytes}, \
                 spill_bytes: {spill_bytes}, shared_bytes: {shared_bytes} }}, "
            )
            .map_err(io::Error::other)?;
        }
        let path = path.canonicalize()?.display().to_string();
        writeln!(
            cubins,
            "    Cubin {{ program: {program:?}, target: {target:?}, bytes: include_bytes!({path:?}), kernels: &[{kernels}] }},"
        )
        .map_err(io::Error::other)?;
    }
    Ok(found.len())
}
