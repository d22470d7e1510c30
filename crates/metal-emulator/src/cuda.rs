//! From the text of a `.cu` file to C++ for the same fibers: what `cuda_shim.h` can't do, token by token.
//!
//! - every `__global__` function gets an entry point without parameters: pointers are bound to buffers in their order, and
//!   what is passed by value, the constants, to the buffer after them
//! - a `__shared__` array becomes a reference into memory that the runtime guards, poisons and counts; `extern __shared__`
//!   the launch's dynamic memory
//!
//! For sources without inline PTX (what an `#if __CUDA_ARCH__` keeps for a device does no harm). Entries must not be made by
//! macros. The device's compiler checks the types.

use crate::chips::Chip;
use crate::prepass::{Entry, Item, PrepassError, Token, Translated, tokens};
use std::fmt::Write;

/// The least that the architectures offer to which the sources are compiled.
pub const CHIPS: [Chip; 1] =
    [Chip { name: "CUDA", threads_max: 1024, threadgroup_bytes_max: 99 << 10, simd_width: 32, buffers_max: 31 }];

/// The H200 (compute capability 9.0).
pub const LARGE_CHIPS: [Chip; 1] =
    [Chip { name: "H200", threads_max: 1024, threadgroup_bytes_max: 227 << 10, simd_width: 32, buffers_max: 31 }];

/// Translates a source whose includes are expanded.
///
/// # Errors
/// Where the text is not of the supported form; the message has the line of the expanded text.
pub fn translate(source: &str) -> Result<Translated, PrepassError> {
    let list = tokens(source);
    let error =
        |at: usize, what: String| PrepassError::Source { line: list.get(at).map_or(0, |token| token.line), what };
    let text = |at: usize| list.get(at).map_or("", |token| token.text);
    let mut replaced: Vec<Option<String>> = vec![None; list.len()];
    let mut entries: Vec<Entry> = Vec::new();
    let (mut generated, mut arrays) = (String::new(), 0);
    for at in 0..list.len() {
        match text(at) {
            "__global__" => {
                let (entry, arguments) = entry(&list, at).map_err(|what| error(at, what))?;
                let _ = writeln!(
                    generated,
                    "extern \"C\" __attribute__((visibility(\"default\"))) void tf_entry_{0}() {{ {0}({arguments}); }}",
                    entry.name
                );
                entries.push(entry);
            }
            "__shared__" => {
                share(&list, at, arrays, &mut replaced).map_err(|what| error(at, what))?;
                arrays += 1;
            }
            _ => {}
        }
    }
    if entries.is_empty() {
        return Err(PrepassError::NoKernel);
    }
    // Headers are pasted in, which their guards would warn of.
    let quiet = "#pragma clang diagnostic ignored \"-Wpragma-once-outside-header\"";
    let mut out = format!("{quiet}\n#include \"cuda_shim.h\"\n");
    for (token, replaced) in list.iter().zip(&replaced) {
        out.push_str(replaced.as_deref().unwrap_or(token.text));
    }
    out.push_str("\n#line 1 \"entry points\"\n");
    out.push_str(&generated);
    Ok(Translated { text: out, entries, constants: Vec::new() })
}

/// The end of the brackets that open at `open`.
fn closing(list: &[Token<'_>], open: usize) -> Result<usize, String> {
    let mut depth = 0;
    for (at, token) in list.iter().enumerate().skip(open) {
        match token.text {
            "(" => depth += 1,
            ")" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Ok(at);
        }
    }
    Err("the brackets don't end".into())
}

/// The entry that is declared at `at`, and the arguments that its entry point passes.
fn entry(list: &[Token<'_>], at: usize) -> Result<(Entry, String), String> {
    let (mut i, mut name) = (at + 1, "");
    let open = loop {
        let token = list.get(i).ok_or("a kernel without parameters")?;
        if token.text == "(" {
            if name != "__launch_bounds__" {
                break i;
            }
            i = closing(list, i)?;
        } else if token.is_word() {
            name = token.text;
        }
        i += 1;
    };
    let close = closing(list, open)?;
    let mut entry = Entry { name: name.into(), buffers: Vec::new(), item: Item::Threadgroup };
    let mut arguments = Vec::new();
    for (index, parameter) in list[open + 1..close].split(|token| token.text == ",").enumerate() {
        let words: Vec<&str> = parameter.iter().filter(|token| !token.is_space()).map(|token| token.text).collect();
        let named = |last: &str| last.starts_with(|c: char| c.is_alphabetic() || c == '_');
        let Some((_, kind)) = words.split_last().filter(|(last, kind)| !kind.is_empty() && named(last)) else {
            return Err(format!("parameter {index} of {name} needs a type and a name"));
        };
        let index = index as u32;
        let is_const = kind.contains(&"const");
        if kind.last() == Some(&"*") {
            entry.buffers.push((index, !is_const));
            arguments.push(format!("static_cast<{}>(msl::tf_buffer({index}u))", kind.join(" ")));
        } else {
            let kind: Vec<&str> = kind.iter().copied().filter(|word| *word != "const").collect();
            entry.buffers.push((index, false));
            arguments.push(format!("*static_cast<const {} *>(msl::tf_buffer({index}u))", kind.join(" ")));
        }
    }
    Ok((entry, arguments.join(", ")))
}

/// Turns one declaration of shared memory into a reference or a pointer.
fn share(list: &[Token<'_>], at: usize, index: usize, replaced: &mut [Option<String>]) -> Result<(), String> {
    let text = |i: usize| list.get(i).map_or("", |token| token.text);
    let stop = (at..list.len()).find(|&i| ["[", ";", ",", "="].contains(&text(i))).unwrap_or(list.len());
    let end = (stop..list.len()).find(|&i| text(i) == ";").ok_or("a shared array without an end")?;
    if list[stop..end].iter().any(|token| [",", "="].contains(&token.text)) {
        return Err("one shared array a statement, without a value".into());
    }
    let name_at = (at + 1..stop).rev().find(|&i| list[i].is_word()).ok_or("a shared array without a name")?;
    let name = text(name_at);
    let before = (0..at).rev().find(|&i| !list[i].is_space());
    if let Some(before) = before.filter(|&i| text(i) == "extern") {
        let kind: String = list[at + 1..name_at].iter().map(|token| token.text).collect();
        for slot in &mut replaced[before..=end] {
            *slot = Some(String::new());
        }
        replaced[before] = Some(format!("{kind} *{name} = static_cast<{kind} *>(msl::tf_dynamic_memory());"));
        return Ok(());
    }
    replaced[at] = Some("typedef".into());
    replaced[name_at] = Some(format!("cuda_array_{index}"));
    replaced[end] = Some(format!(
        "; cuda_array_{index} &{name} = *static_cast<cuda_array_{index} *>(msl::tf_threadgroup_array({index}u, \
         sizeof(cuda_array_{index}), \"{name}\"));"
    ));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "struct Shape { unsigned n; };\nextern \"C\" __global__ void __launch_bounds__(32, 2)\nf(const float* x, \
         unsigned* out, const Shape shape) {\n    extern __shared__ float row[];\n    __shared__ float part[32];\n}\n";

    #[test]
    fn pointers_are_bound_in_order_and_the_constants_after_them() {
        let translated = translate(SOURCE).unwrap();
        assert_eq!(
            translated.entries,
            [Entry { name: "f".into(), buffers: vec![(0, false), (1, true), (2, false)], item: Item::Threadgroup }]
        );
        for part in [
            "f(static_cast<const float *>(msl::tf_buffer(0u)), static_cast<unsigned *>(msl::tf_buffer(1u)), \
             *static_cast<const Shape *>(msl::tf_buffer(2u)))",
            "*row = static_cast< float  *>(msl::tf_dynamic_memory());",
            "typedef float cuda_array_1[32]; cuda_array_1 &part = ",
        ] {
            assert!(translated.text.contains(part), "{part} not in {}", translated.text);
        }
    }

    #[test]
    fn what_is_not_supported_is_named() {
        let cases = [
            ("void f() {}", "no kernel"),
            ("__global__ void f(float*) { }", "needs a type and a name"),
            ("__global__ void f(float* x) { __shared__ float a[2], b[2]; }", "one shared array"),
            ("__global__ void f(float* x", "don't end"),
        ];
        for (source, part) in cases {
            let error = translate(source).unwrap_err().to_string();
            assert!(error.contains(part), "{source}: {error}");
        }
    }
}
