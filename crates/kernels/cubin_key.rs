// Which cubin belongs to which sources: shared by the build script and `cargo xtask cubins`, so that a build never embeds
// code of other sources than its own.

/// Everything about the compiler that changes its output.
pub const COMPILER: &str = "NVRTC 13.0.88 --std=c++17 --fmad=false --device-as-default-execution-space";

/// 64 bits over the compiler, the texts that sources include (name and text, in the order of the names) and the source.
pub fn key(includes: &[(String, String)], source: &str) -> String {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut add = |text: &str| {
        for byte in text.bytes().chain([0]) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    };
    add(COMPILER);
    for (name, text) in includes {
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
