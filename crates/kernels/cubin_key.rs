// Which cubin belongs to which sources: shared by the build script and `cargo xtask cubins`, so that a build never embeds
// code of other sources than its own.

/// Everything about the compiler that changes its output.
pub const COMPILER: &str = "NVRTC 13.0.88 --std=c++17 --fmad=false --device-as-default-execution-space";

/// 64 bits over the compiler, the texts that the source includes, directly or not (name and text, in the order of the names),
/// and the source.
pub fn key(includes: &[(String, String)], source: &str) -> String {
    let mut included = std::collections::BTreeMap::new();
    let mut texts = vec![source];
    while let Some(text) = texts.pop() {
        for line in text.lines() {
            let name = line.trim().strip_prefix("#include \"").and_then(|rest| rest.split('"').next());
            if let Some((name, text)) = includes.iter().find(|(known, _)| Some(known.as_str()) == name)
                && included.insert(name.as_str(), text.as_str()).is_none()
            {
                texts.push(text);
            }
        }
    }
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut add = |text: &str| {
        for byte in text.bytes().chain([0]) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    };
    add(COMPILER);
    for (name, text) in included {
        add(name);
        add(text);
    }
    add(source);
    format!("{hash:016x}")
}

/// The sources below the kernel families: program and path. A family's `kernel.cu` is its program; another file is `family.stem`.
pub fn sources(families: &std::path::Path) -> std::io::Result<Vec<(String, std::path::PathBuf)>> {
    let mut found = Vec::new();
    for family in std::fs::read_dir(families)? {
        let family = family?.path();
        if !family.is_dir() {
            continue;
        }
        let name = family.file_name().unwrap_or_default().to_string_lossy().into_owned();
        for file in std::fs::read_dir(&family)? {
            let file = file?.path();
            if file.extension().is_some_and(|extension| extension == "cu") {
                let stem = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
                let program = if stem == "kernel" { name.clone() } else { format!("{name}.{stem}") };
                found.push((program, file));
            }
        }
    }
    found.sort();
    Ok(found)
}

/// The texts that sources include, by name.
pub fn includes(families: &std::path::Path) -> std::io::Result<Vec<(String, String)>> {
    let mut found = Vec::new();
    for file in std::fs::read_dir(families.join("shared"))? {
        let file = file?.path();
        if file.extension().is_some_and(|extension| extension == "cuh") {
            let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
            found.push((name, std::fs::read_to_string(&file)?));
        }
    }
    found.sort();
    Ok(found)
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
pub fn resources(log: &str) -> std::collections::BTreeMap<String, Resources> {
    fn before(line: &str, word: &str) -> Option<u64> {
        let head = &line[..line.find(word)?];
        head.split(|c: char| !c.is_ascii_digit()).rfind(|part| !part.is_empty())?.parse().ok()
    }
    let mut kernels = std::collections::BTreeMap::<String, Resources>::new();
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
