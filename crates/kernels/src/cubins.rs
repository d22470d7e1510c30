//! The CUDA code of this build: cubins that were embedded, or, where there is none, sources compiled by an NVRTC that the
//! machine happens to have (for developers).

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};
use tf_device::cuda::nvrtc;

#[path = "../cubin_key.rs"]
#[allow(dead_code)] // The build script uses the rest.
mod cubin_key;

/// A compressed cubin (zlib).
struct Cubin {
    program: &'static str,
    target: &'static str,
    bytes: &'static [u8],
    kernels: &'static [Figures],
}

/// What the compiler says of one kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Figures {
    /// The entry's name.
    pub kernel: &'static str,
    /// Of a thread.
    pub registers: u32,
    /// Of a thread.
    pub stack_bytes: u32,
    /// Of a thread: stores.
    pub spill_bytes: u32,
    /// Declared by the kernel, for a block.
    pub shared_bytes: u32,
}

include!(concat!(env!("OUT_DIR"), "/cubins.rs"));

/// What was asked for before: programs and targets, each decompressed or compiled once and kept.
type Known = HashMap<(String, String), Option<&'static [u8]>>;
static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);

/// The cubin of a program (a family's folder, or `family.stem`) for a compiler target such as `90a`.
pub fn find(program: &str, target: &str) -> Option<&'static [u8]> {
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    *known.entry((program.to_owned(), target.to_owned())).or_insert_with(|| {
        let made = match embedded(program, target) {
            Some(cubin) => cubin.map_err(|text| format!("the embedded cubin is damaged: {text}")),
            None => compile(program, target, &[]),
        };
        match made {
            Ok(cubin) => Some(&*cubin.leak()),
            Err(text) => {
                // The caller says which build is missing; this says why the fallback did not help.
                eprintln!("CUDA code of `{program}` for sm_{target}: {text}");
                None
            }
        }
    })
}

/// Bytes of the embedded code of a program, 0 where there is none: what compiling it takes goes with them.
pub fn embedded_bytes(program: &str, target: &str) -> usize {
    held(program, target).map_or(0, |cubin| cubin.bytes.len())
}

/// The targets that every program of this build has a cubin for.
pub fn targets() -> Vec<&'static str> {
    let has = |target: &str| SOURCES.iter().all(|(program, _)| held(program, target).is_some());
    let mut targets: Vec<&str> = CUBINS.iter().map(|cubin| cubin.target).filter(|target| has(target)).collect();
    targets.sort_unstable();
    targets.dedup();
    targets
}

/// The compiler's figures of every embedded kernel: program, target, figures.
pub fn figures() -> impl Iterator<Item = (&'static str, &'static str, &'static Figures)> {
    CUBINS.iter().flat_map(|cubin| cubin.kernels.iter().map(|figures| (cubin.program, cubin.target, figures)))
}

/// The program whose source is `text`, or, for a text that several include, directly or by another, those.
pub fn programs_of(text: &str) -> Vec<&'static str> {
    SOURCES.iter().filter(|(_, source)| takes_in(source, text)).map(|(program, _)| *program).collect()
}

/// Whether `source` is `text` or includes it, however deep.
fn takes_in(source: &str, text: &str) -> bool {
    let (mut texts, mut seen) = (vec![source], Vec::new());
    while let Some(next) = texts.pop() {
        if next == text {
            return true;
        }
        for (name, header) in HEADERS {
            if !seen.contains(name) && next.contains(&format!("\"{name}\"")) {
                seen.push(name);
                texts.push(header);
            }
        }
    }
    false
}

/// The text of a program's source.
fn source(program: &str) -> Option<&'static str> {
    SOURCES.iter().find(|(name, _)| *name == program).map(|(_, text)| *text)
}

/// Compiles a program with some texts replaced, each of which must occur: planted faults of the kernel contract, and
/// sources of a build without cubins.
///
/// # Errors
/// What is missing, does not occur or did not compile.
pub fn compile(program: &str, target: &str, edits: &[(&str, &str)]) -> Result<Vec<u8>, String> {
    nvrtc::compile(&edited(program, edits)?, target)
}

/// The texts of a program, its source first, with some of them replaced.
fn edited<'a>(program: &str, edits: &[(&str, &str)]) -> Result<Vec<(&'a str, String)>, String> {
    let source = source(program).ok_or_else(|| format!("there is no CUDA source called `{program}`"))?;
    let mut texts: Vec<(&str, String)> = vec![("kernel.cu", source.to_owned())];
    texts.extend(HEADERS.iter().map(|(name, text)| (*name, (*text).to_owned())));
    for (from, to) in edits {
        let mut found = false;
        for (_, text) in &mut texts {
            if text.contains(from) {
                *text = text.replace(from, to);
                found = true;
            }
        }
        if !found {
            return Err(format!("`{from}` does not occur in the source of `{program}`"));
        }
    }
    Ok(texts)
}

/// Names what [`compile`] makes: equal names are equal texts, compilers and targets.
///
/// # Errors
/// As of [`compile`], before anything is compiled.
pub fn name_of(program: &str, target: &str, edits: &[(&str, &str)]) -> Result<String, String> {
    let mut texts = edited(program, edits)?;
    let (_, source) = texts.remove(0);
    let headers: Vec<(String, String)> = texts.into_iter().map(|(name, text)| (name.to_owned(), text)).collect();
    Ok(format!("{program}.sm_{target}.{}", cubin_key::key(&headers, &source)))
}

fn held(program: &str, target: &str) -> Option<&'static Cubin> {
    CUBINS.iter().find(|cubin| cubin.program == program && cubin.target == target)
}

fn embedded(program: &str, target: &str) -> Option<Result<Vec<u8>, String>> {
    let bytes = held(program, target)?.bytes;
    Some(miniz_oxide::inflate::decompress_to_vec_zlib(bytes).map_err(|error| error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_embedded_is_whole_and_what_is_unknown_is_refused() {
        for cubin in CUBINS {
            let whole = embedded(cubin.program, cubin.target).expect("it is listed").expect("decompresses");
            assert!(whole.starts_with(b"\x7fELF"), "{} for sm_{}", cubin.program, cubin.target);
            assert!(cubin.kernels.iter().all(|kernel| kernel.registers > 0), "{}", cubin.program);
            assert!(!cubin.kernels.is_empty(), "{} for sm_{} has no figures", cubin.program, cubin.target);
        }
        assert!(find("no such family", "90a").is_none());
        assert!(source("linear_fp8").is_some_and(|text| text.contains("slab.cuh")));
        assert!(HEADERS.iter().any(|(name, _)| *name == "slab.cuh"));
    }

    #[test]
    fn the_programs_of_a_header_are_all_that_it_reaches() {
        let header = |name: &str| HEADERS.iter().find(|(known, _)| *known == name).expect("a header by this name").1;
        assert!(!source("draft_head").expect("a program by this name").contains("\"prelude.cuh\""), "not by itself");
        let programs = programs_of(header("prelude.cuh"));
        assert!(programs.contains(&"draft_head"), "by draw.cuh: {programs:?}");
        assert!(!programs.contains(&"linear_fp8"), "{programs:?}");
        assert_eq!(programs_of(source("top_k").expect("a program by this name")), ["top_k"]);
        assert!(programs_of("no such text").is_empty());
    }

    #[test]
    fn an_edit_that_does_not_occur_is_refused_before_anything_is_compiled() {
        let refused = compile("linear_fp8", "90a", &[("no such text", "")]).expect_err("refused");
        assert!(refused.contains("does not occur"), "{refused}");
    }
}
