//! The CUDA programs that the edits of a contract make, compiled ahead of the proofs by several processes at once.

use crate::controls::apply_edit;
use crate::edits::{CLAIM, CODE, REFUSAL, is_there};
use std::fs::{self, File};
use std::path::Path;
use tf_device::gpu::Backend;
use tf_kernels::contract::{Contract, Plant};
use tf_kernels::cubins;

/// One edited program.
struct Edited {
    program: &'static str,
    /// The text that is edited: the program's own or one that it includes.
    source: &'static str,
    text: String,
}

impl Edited {
    /// Its file's name in a folder, without its ending.
    fn name(&self, target: &str) -> Result<String, String> {
        cubins::name_of(self.program, target, &[(self.source, &self.text)])
    }
}

/// The programs that an edit of `source` reaches and that the launches of a kernel may ask for: its family's, or all where
/// none is.
fn reached(contract: &Contract, source: &str) -> Vec<&'static str> {
    let all = cubins::programs_of(source);
    let mine = |program: &&str| program.split('.').next() == Some(contract.family());
    match all.iter().any(mine) {
        true => all.into_iter().filter(mine).collect(),
        false => all,
    }
}

/// What the CUDA edits of a kernel make. An edit that finds no place makes nothing: its control says so.
fn of(contract: &Contract) -> Vec<Edited> {
    let edits = contract.edits.iter().filter_map(|control| match control.plant {
        Plant::Edit { backend: Backend::Cuda, source, find, replace } => {
            Some((source, apply_edit(source, find, replace).ok()?))
        }
        _ => None,
    });
    let each = edits.flat_map(|(source, text)| {
        let programs = reached(contract, source).into_iter();
        programs.map(move |program| Edited { program, source, text: text.clone() }).collect::<Vec<_>>()
    });
    each.collect()
}

/// How much compiling the edits of a kernel are for a target, in no unit, and the names of what they make.
pub fn programs(contract: &Contract, target: &str) -> (usize, Vec<String>) {
    let edited = of(contract);
    let bytes = edited.iter().map(|edited| cubins::embedded_bytes(edited.program, target)).sum();
    (bytes, edited.iter().filter_map(|edited| edited.name(target).ok()).collect())
}

/// Compiles the programs that `folder` lacks and that no other process has begun; returns how many.
///
/// # Errors
/// A folder that can't be written. What does not compile is written there.
pub fn compile(folder: &Path, target: &str, contracts: &[&Contract]) -> Result<usize, String> {
    let mut count = 0;
    let mut contracts = contracts.to_vec();
    // The order of the proofs, which wait for all edits of a kernel.
    contracts.sort_by_key(|contract| programs(contract, target).0);
    for edited in contracts.iter().flat_map(|contract| of(contract)) {
        let name = edited.name(target)?;
        let claim = folder.join(format!("{name}.{CLAIM}"));
        if is_there(folder, &name) || File::create_new(&claim).is_err() {
            continue;
        }
        // Why one does not compile is news for its control.
        let _ = obtain(folder, target, edited.program, edited.source, &edited.text);
        if !is_there(folder, &name) {
            return Err(format!("cannot write {name}.{CODE} into {}", folder.display()));
        }
        count += 1;
        fs::remove_file(&claim).map_err(|error| format!("cannot remove {}: {error}", claim.display()))?;
    }
    Ok(count)
}

/// The code of an edited program: from the folder, or compiled and left there.
///
/// # Errors
/// What the compiler said, or a folder that can't be used.
pub fn obtain(folder: &Path, target: &str, program: &str, source: &str, text: &str) -> Result<Vec<u8>, String> {
    let edits = [(source, text)];
    let name = cubins::name_of(program, target, &edits)?;
    let (code, refusal) = (folder.join(format!("{name}.{CODE}")), folder.join(format!("{name}.{REFUSAL}")));
    if let Ok(bytes) = fs::read(&code) {
        return miniz_oxide::inflate::decompress_to_vec_zlib(&bytes)
            .map_err(|error| format!("{} is damaged ({error}): remove it", code.display()));
    }
    if let Ok(text) = fs::read_to_string(&refusal) {
        return Err(text);
    }
    let made = cubins::compile(program, target, &edits);
    let (place, bytes) = match &made {
        Ok(cubin) => (code, miniz_oxide::deflate::compress_to_vec_zlib(cubin, 3)),
        Err(text) => (refusal, text.clone().into_bytes()),
    };
    // Whole or not at all: others look for it.
    let part = place.with_extension(std::process::id().to_string());
    fs::write(&part, bytes)
        .and_then(|()| fs::rename(&part, &place))
        .map_err(|error| format!("cannot keep compiled code in {}: {error}", folder.display()))?;
    made
}
