//! From the text of a `.metal` file to C++: what macros can't do, token by token. Lines and columns of the source stay.
//!
//! - quoted `#include`s are replaced by the named texts, as the host does before it hands a source to the driver
//! - every `kernel` function gets an entry point without parameters, which asks the runtime for the arguments; the
//!   attributes of the parameters vanish
//! - a `threadgroup` array becomes a reference into memory that the runtime guards, poisons and counts
//!
//! In the second form ([`Pass::Lint`]) address spaces stay in the types and nothing is generated.

use std::fmt::Write;

/// Which of the two forms is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    Run,
    Lint,
}

/// Why a source is not translated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PrepassError {
    #[error("line {line}: {what}")]
    Source { line: usize, what: String },
    #[error("the source includes \"{0}\", which was not given")]
    Include(String),
    #[error("the source has no kernel")]
    NoKernel,
}

/// What a kernel deals out: whether its grid may be cut into threadgroups of another size without another result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Item {
    /// An item to each SIMD group, counted over the grid.
    SimdGroup,
    /// An item to each thread of the grid.
    Thread,
    /// An item to each threadgroup, of any number of threads.
    Threadgroup,
}

/// A kernel of a source: its name, the buffers it binds with whether it may write them, and what it deals out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub name: String,
    pub buffers: Vec<(u32, bool)>,
    pub item: Item,
}

impl Entry {
    /// Of the positions that it asks for: a threadgroup's own decide, then the SIMD group's.
    fn asks_for(&mut self, position: &str) {
        match position {
            "thread_position_in_threadgroup" | "threads_per_threadgroup" | "thread_index_in_threadgroup" => {
                self.item = Item::Threadgroup;
            }
            "simdgroups_per_threadgroup" if self.item == Item::Thread => self.item = Item::SimdGroup,
            _ => {}
        }
    }
}

/// A scalar that the host gives when it makes a pipeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FunctionConstant {
    pub index: u32,
    pub name: String,
    pub bytes: usize,
    /// The source asks whether it is given.
    pub may_miss: bool,
}

/// The C++ of a source, its kernels and its function constants.
#[derive(Clone, Debug)]
pub struct Translated {
    pub text: String,
    pub entries: Vec<Entry>,
    /// In the order of the source.
    pub constants: Vec<FunctionConstant>,
}

/// `source` with its quoted includes replaced; each text is taken once.
///
/// # Errors
/// [`PrepassError::Include`].
pub fn expand(name: &str, source: &str, includes: &[(&str, &str)]) -> Result<String, PrepassError> {
    let mut text = format!("#line 1 \"{name}\"\n");
    let mut seen = Vec::new();
    for (index, line) in source.lines().enumerate() {
        let Some(wanted) = line.trim().strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"')) else {
            text.push_str(line);
            text.push('\n');
            continue;
        };
        let Some((_, included)) = includes.iter().find(|(name, _)| *name == wanted) else {
            return Err(PrepassError::Include(wanted.into()));
        };
        if !seen.contains(&wanted) {
            seen.push(wanted);
            text.push_str(&expand(wanted, included, includes)?);
        }
        let _ = writeln!(text, "#line {} \"{name}\"", index + 2);
    }
    Ok(text)
}

pub(crate) struct Token<'a> {
    pub text: &'a str,
    pub line: usize,
}

impl Token<'_> {
    pub fn is_space(&self) -> bool {
        self.text.starts_with(char::is_whitespace)
            || self.text.starts_with("//")
            || self.text.starts_with("/*")
            || self.text.starts_with('#')
    }
    pub fn is_word(&self) -> bool {
        self.text.starts_with(|c: char| c.is_alphabetic() || c == '_')
    }
}

pub(crate) fn tokens(source: &str) -> Vec<Token<'_>> {
    let (mut list, mut rest, mut line) = (Vec::new(), source, 1);
    while let Some(first) = rest.chars().next() {
        let end_of_line = rest.find('\n').unwrap_or(rest.len());
        let word = |c: char| c.is_alphanumeric() || c == '_';
        let length = if rest.starts_with("//") || first == '#' {
            end_of_line
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |at| at + 2)
        } else if rest.starts_with("[[") || rest.starts_with("]]") {
            2
        } else if first == '"' {
            rest[1..].find('"').map_or(rest.len(), |at| at + 2)
        } else if first.is_whitespace() {
            rest.find(|c: char| !c.is_whitespace()).unwrap_or(rest.len())
        } else if word(first) {
            rest.find(|c: char| !word(c)).unwrap_or(rest.len())
        } else {
            first.len_utf8()
        };
        let (text, after) = rest.split_at(length);
        list.push(Token { text, line });
        line += text.matches('\n').count();
        rest = after;
    }
    list
}

/// Positions whose value a kernel may ask for, and where the runtime keeps them.
const POSITIONS: &[(&str, &str)] = &[
    ("thread_position_in_grid", "position_in_grid"),
    ("thread_position_in_threadgroup", "position_in_threadgroup"),
    ("threadgroup_position_in_grid", "threadgroup_position"),
    ("threads_per_threadgroup", "threads_per_threadgroup"),
    ("threadgroups_per_grid", "threadgroups"),
    ("threads_per_grid", "grid"),
    ("thread_index_in_simdgroup", "lane"),
    ("simdgroup_index_in_threadgroup", "simdgroup"),
    ("simdgroups_per_threadgroup", "simdgroups"),
    ("thread_index_in_threadgroup", "flat"),
];
/// Those with three components.
const VECTORS: usize = 6;

/// Translates a source whose includes are expanded.
///
/// # Errors
/// Where the text is not of the supported form; the message has the line of the expanded text.
pub fn translate(source: &str, pass: Pass) -> Result<Translated, PrepassError> {
    let list = tokens(source);
    let error =
        |at: usize, what: String| PrepassError::Source { line: list.get(at).map_or(0, |token| token.line), what };
    let fail = |at: usize, what: String| Err(error(at, what));
    let text = |at: usize| list.get(at).map_or("", |token| token.text);
    let mut replaced: Vec<Option<String>> = vec![None; list.len()];
    let mut entries: Vec<Entry> = Vec::new();
    let mut generated = String::new();
    let mut constants = Vec::new();
    let mut arrays = 0;
    let mut parameters_end = 0;

    for at in 0..list.len() {
        if is_vector(text(at)) && list.get(at + 1).is_some_and(|next| next.text == "(") {
            replaced[at] = Some(format!("msl_make_{}", text(at)));
        }
        if text(at) == "kernel" {
            let Some(open) = (at..list.len()).find(|&i| text(i) == "(") else {
                return fail(at, "a kernel without parameters".into());
            };
            let Some(name) = list[at..open].iter().rev().find(|token| token.is_word()) else {
                return fail(at, "a kernel without a name".into());
            };
            let mut entry = Entry { name: name.text.into(), buffers: Vec::new(), item: Item::Thread };
            let mut arguments = Vec::new();
            let (mut depth, mut start, mut i) = (0, open + 1, open);
            loop {
                match text(i) {
                    "" => return fail(at, format!("the parameters of {} don't end", name.text)),
                    "(" | "[[" => depth += 1,
                    "]]" => depth -= 1,
                    ")" => depth -= 1,
                    _ => {}
                }
                let ends = depth == 0 && text(i) == ")";
                let splits = ends || (depth == 1 && text(i) == ",");
                if splits && list[start..i].iter().any(|token| !token.is_space()) {
                    arguments.push(parameter(&list[start..i], &mut entry).map_err(|what| error(start, what))?);
                    let mut inside = false;
                    for j in start..i {
                        inside |= text(j) == "[[";
                        let closes = text(j) == "]]";
                        if inside && (text(j) == "[[" || closes || !list[j].is_space()) {
                            replaced[j] = Some(" ".repeat(text(j).len()));
                        }
                        inside &= !closes;
                    }
                }
                if splits {
                    start = i + 1;
                }
                if ends {
                    parameters_end = i;
                    break;
                }
                i += 1;
            }
            let _ = writeln!(
                generated,
                "extern \"C\" __attribute__((visibility(\"default\"))) void tf_entry_{0}() {{ {0}({1}); }}",
                entry.name,
                arguments.join(", ")
            );
            entries.push(entry);
        }
        if text(at) == "constant" && at >= parameters_end {
            let end = (at..list.len()).find(|&i| [";", "=", "("].contains(&text(i)) || i + 1 == list.len());
            let end = end.map_or(list.len(), |end| if text(end) == "(" { end + 3 } else { end });
            let statement: Vec<&str> = list[at..end.min(list.len())]
                .iter()
                .filter(|token| !token.is_space())
                .map(|token| token.text)
                .collect();
            let ["constant", kind, name, "[[", "function_constant", "(", index, ..] = statement.as_slice() else {
                continue;
            };
            let Some(close) = (at..list.len()).find(|&i| text(i) == ";") else {
                return fail(at, format!("the function constant {name} doesn't end"));
            };
            let constant = function_constant(kind, name, index, &list).map_err(|what| error(at, what))?;
            for slot in &mut replaced[at..=close] {
                *slot = Some(String::new());
            }
            replaced[at] = Some(match pass {
                Pass::Lint => {
                    format!("constant {kind} {name} = {kind}(); static const bool msl_is_defined_{name} = false;")
                }
                Pass::Run => format!(
                    "static {kind} msl_constant_{0}; static bool msl_has_{0}; extern \"C\" \
                     __attribute__((visibility(\"default\"))) void tf_constant_{0}(const void *value) {{ msl_has_{0} = value; \
                     if (value) __builtin_memcpy(&msl_constant_{0}, value, sizeof msl_constant_{0}); }} \
                     static const {kind} &{name} = msl_constant_{0}; \
                     static const bool &msl_is_defined_{name} = msl_has_{0};",
                    constant.index
                ),
            });
            constants.push(constant);
            continue;
        }
        if text(at) != "threadgroup" || at < parameters_end {
            continue;
        }
        // Up to what tells a pointer or a parameter from an array.
        let stops = ["*", "&", ")", ",", ";", "[", "=", "{", ">"];
        let Some(stop) = (at..list.len()).find(|&i| stops.contains(&text(i))) else {
            return fail(at, "threadgroup without a declaration".into());
        };
        if !["[", ";"].contains(&text(stop)) {
            continue;
        }
        if pass == Pass::Lint {
            replaced[at] = Some("static threadgroup".into());
            continue;
        }
        let Some(end) = (stop..list.len()).find(|&i| text(i) == ";") else {
            return fail(at, "a threadgroup array without an end".into());
        };
        if list[stop..end].iter().any(|token| [",", "="].contains(&token.text)) {
            return fail(at, "one threadgroup array a statement, without a value".into());
        }
        let Some(name_at) = (at + 1..stop).rev().find(|&i| list[i].is_word()) else {
            return fail(at, "a threadgroup array without a name".into());
        };
        let name = text(name_at);
        if let Some(entry) = entries.last_mut() {
            entry.item = Item::Threadgroup;
        }
        replaced[at] = Some("typedef".into());
        replaced[name_at] = Some(format!("msl_array_{arrays}"));
        replaced[end] = Some(format!(
            "; msl_array_{arrays} &{name} = *static_cast<msl_array_{arrays} *>(msl::tf_threadgroup_array({arrays}u, \
             sizeof(msl_array_{arrays}), \"{name}\"));"
        ));
        arrays += 1;
    }
    if entries.is_empty() {
        return Err(PrepassError::NoKernel);
    }
    let mut out = String::new();
    for (token, replaced) in list.iter().zip(&replaced) {
        out.push_str(replaced.as_deref().unwrap_or(token.text));
    }
    if pass == Pass::Run {
        out.push_str("\n#line 1 \"entry points\"\n");
        out.push_str(&generated);
    }
    Ok(Translated { text: out, entries, constants })
}

/// Whether a word names a vector type.
fn is_vector(word: &str) -> bool {
    let scalars = ["float", "half", "bfloat", "char", "uchar", "short", "ushort", "int", "uint", "ulong"];
    word.strip_suffix(['2', '3', '4']).is_some_and(|scalar| scalars.contains(&scalar))
}

/// A function constant as declared, and whether the source asks for its presence.
fn function_constant(kind: &str, name: &str, index: &str, list: &[Token<'_>]) -> Result<FunctionConstant, String> {
    let bytes = match kind {
        "bool" | "uchar" | "char" => 1,
        "ushort" | "short" | "half" | "bfloat" => 2,
        "uint" | "int" | "float" => 4,
        other => return Err(format!("function constant {name}: the emulator has no {other}; use a scalar")),
    };
    let index = index.parse().map_err(|_| format!("function constant {name}: `{index}` is no index"))?;
    let words: Vec<&str> = list.iter().filter(|token| !token.is_space()).map(|token| token.text).collect();
    let may_miss = words.windows(3).any(|words| words == ["is_function_constant_defined", "(", name]);
    Ok(FunctionConstant { index, name: name.into(), bytes, may_miss })
}

/// The expression that an entry point passes for one parameter.
fn parameter(tokens: &[Token<'_>], entry: &mut Entry) -> Result<String, String> {
    let words: Vec<&Token<'_>> = tokens.iter().filter(|token| !token.is_space()).collect();
    let spelled = words.iter().map(|token| token.text).collect::<Vec<_>>().join(" ");
    let Some(open) = words.iter().position(|token| token.text == "[[") else {
        return Err(format!("parameter `{spelled}` has no attribute; name its buffer"));
    };
    let (declaration, attribute) = (&words[..open], &words[open + 1..]);
    let attribute_name = attribute.first().map_or("", |token| token.text);
    let kind: Vec<&str> = declaration[..declaration.len().saturating_sub(1)]
        .iter()
        .map(|token| token.text)
        .filter(|word| !["device", "threadgroup"].contains(word))
        .map(|word| if word == "constant" { "const" } else { word })
        .collect();
    let index = || match attribute {
        [_, open, number, close, ..] if open.text == "(" && close.text == ")" => {
            number.text.parse::<u32>().map_err(|_| format!("`{spelled}`: `{}` is no index", number.text))
        }
        _ => Err(format!("`{spelled}`: the attribute needs an index")),
    };
    match attribute_name {
        "buffer" => {
            let index = index()?;
            if entry.buffers.iter().any(|(other, _)| *other == index) {
                return Err(format!("`{spelled}`: buffer {index} is bound twice"));
            }
            entry.buffers.push((index, !kind.contains(&"const")));
            match kind.last() {
                Some(&"*") => Ok(format!("static_cast<{}>(msl::tf_buffer({index}u))", kind.join(" "))),
                Some(&"&") => {
                    Ok(format!("*static_cast<{} *>(msl::tf_buffer({index}u))", kind[..kind.len() - 1].join(" ")))
                }
                _ => Err(format!("`{spelled}`: a buffer is a pointer or a reference")),
            }
        }
        "threadgroup" => {
            entry.item = Item::Threadgroup;
            Ok(format!("static_cast<{}>(msl::tf_threadgroup_argument({}u))", kind.join(" "), index()?))
        }
        other => {
            let Some(at) = POSITIONS.iter().position(|(name, _)| *name == other) else {
                return Err(format!("`{spelled}`: the emulator doesn't know the attribute {other}"));
            };
            entry.asks_for(other);
            let value = format!("msl::tf_current->{}", POSITIONS[at].1);
            match (kind.as_slice(), at < VECTORS) {
                (["uint"], true) => Ok(format!("{value}.x")),
                (["uint2"], true) => Ok(format!("{value}.xy")),
                (["uint3"], true) => Ok(value),
                (["uint"], false) => Ok(value),
                _ => Err(format!("`{spelled}`: use uint, uint2 or uint3 for positions")),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "#include <metal_stdlib>\nusing namespace metal;\nkernel void f(device float *x [[buffer(0)]],\n    \
         constant uint &n [[buffer(2)]], uint t [[thread_position_in_grid]]) {\n    threadgroup float part[32];\n    \
         threadgroup float *p = part; // threadgroup float q[1];\n    x[t] = part[n];\n}\n";

    #[test]
    fn entry_points_ask_for_what_the_parameters_name() {
        let translated = translate(SOURCE, Pass::Run).unwrap();
        assert_eq!(
            translated.entries,
            [Entry { name: "f".into(), buffers: vec![(0, true), (2, false)], item: Item::Threadgroup }]
        );
        for part in [
            "f(static_cast<float *>(msl::tf_buffer(0u)), *static_cast<const uint *>(msl::tf_buffer(2u)), \
             msl::tf_current->position_in_grid.x)",
            "typedef float msl_array_0[32]; msl_array_0 &part = ",
            "threadgroup float *p = part;",
        ] {
            assert!(translated.text.contains(part), "{part} not in {}", translated.text);
        }
        assert!(!translated.text.contains("[["));
    }

    #[test]
    fn the_lint_form_keeps_arrays_and_address_spaces() {
        let translated = translate(SOURCE, Pass::Lint).unwrap();
        assert!(translated.text.contains("static threadgroup float part[32];"));
        assert!(!translated.text.contains("tf_entry_"));
    }

    #[test]
    fn what_is_not_supported_is_named() {
        let cases = [
            ("void f() {}", "no kernel"),
            ("kernel void f(device float *x) {}", "has no attribute"),
            ("kernel void f(device float *x [[texture(0)]]) {}", "doesn't know the attribute texture"),
            ("kernel void f(device float *x [[buffer(0)]], device float *y [[buffer(0)]]) {}", "bound twice"),
            ("kernel void f(device float x [[buffer(0)]]) {}", "a pointer or a reference"),
            ("kernel void f(ushort t [[thread_position_in_grid]]) {}", "use uint"),
            ("kernel void f() { threadgroup float a[2], b[2]; }", "one threadgroup array"),
        ];
        for (source, part) in cases {
            let error = translate(source, Pass::Run).unwrap_err().to_string();
            assert!(error.contains(part), "{source}: {error}");
        }
    }

    #[test]
    fn includes_are_taken_once_and_lines_stay() {
        let text = expand("a.metal", "one\n#include \"b\"\n#include \"b\"\nfour\n", &[("b", "two\n")]).unwrap();
        assert_eq!(text.matches("two").count(), 1);
        assert!(text.contains("#line 4 \"a.metal\"\nfour\n"), "{text}");
        assert!(expand("a.metal", "#include \"c\"\n", &[("b", "")]).is_err());
    }
}
