//! Folders of edited CUDA programs: compiled code by name, why there is none, and who compiles one just now. Such a folder may
//! be kept, or carried to another machine.

use std::fs;
use std::path::Path;

/// Endings of the files: compressed code, why there is none, and a process that compiles it.
pub const CODE: &str = "cubin.z";
/// See [`CODE`].
pub const REFUSAL: &str = "refused";
/// See [`CODE`].
pub const CLAIM: &str = "claim";

/// What a run compiles before kernels are proved.
#[derive(Clone, Debug, Default)]
pub struct Ahead {
    /// For what; `None` compiles nothing.
    pub architecture: Option<String>,
    /// By kernel: how much compiling there is in all, in no unit, and the names of its edited programs.
    pub programs: Vec<(usize, Vec<String>)>,
}

/// Whether a folder has the program of a name, or why there is none.
pub fn is_there(folder: &Path, name: &str) -> bool {
    [CODE, REFUSAL].iter().any(|end| folder.join(format!("{name}.{end}")).exists())
}

/// Lets go of what a process that is gone had begun.
pub fn forget_claims(folder: &Path) {
    let files = fs::read_dir(folder).into_iter().flatten().flatten();
    for file in files.map(|file| file.path()).filter(|path| path.extension().is_some_and(|end| end == CLAIM)) {
        // Whoever can't be let go is compiled by the process that needs it.
        let _ = fs::remove_file(file);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_there_with_its_code_or_with_why_it_has_none() {
        let folder = std::env::temp_dir().join(format!("tensorfold-edits-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        for name in ["a.cubin.z", "b.refused", "c.claim", "d.cubin.z.part"] {
            fs::write(folder.join(name), "").unwrap();
        }
        let there = || ["a", "b", "c", "d"].map(|name| is_there(&folder, name));
        assert_eq!(there(), [true, true, false, false]);
        forget_claims(&folder);
        assert_eq!(there(), [true, true, false, false]);
        assert!(!folder.join("c.claim").exists() && folder.join("b.refused").exists());
        fs::remove_dir_all(&folder).unwrap();
    }
}
