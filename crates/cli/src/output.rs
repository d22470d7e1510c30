//! Files that the user names: those that are read, and those for results.

use std::fs;
use std::io::{ErrorKind, Result};
use std::path::{Path, PathBuf};

use crate::arguments::Mistakes;

/// The text of a file that the option `flag` names.
///
/// # Errors
/// A file that isn't there or can't be read as text: wrong usage.
pub fn read(flag: &str, file: &str) -> std::result::Result<String, Mistakes> {
    fs::read_to_string(file).map_err(|error| Mistakes(vec![format!("--{flag} {file} can't be read: {error}")]))
}

/// Whether a result can be written later: asked before the work that it is the result of.
///
/// # Errors
/// A folder, or a place in a folder that isn't there: wrong usage.
pub fn check(flag: &str, file: &str) -> std::result::Result<(), Mistakes> {
    let path = Path::new(file);
    let above = path.parent().filter(|above| !above.as_os_str().is_empty());
    let wrong =
        |reason: &str| Err(Mistakes(vec![format!("--{flag} {file}: {reason}. Name a file in a folder that is there")]));
    match above {
        _ if path.is_dir() => wrong("it is a folder"),
        Some(above) if !above.is_dir() => wrong(&format!("there is no folder {}", above.display())),
        _ => Ok(()),
    }
}

/// Writes a whole file under another name first, so that a full disk costs no older one. A link's target is written and the link
/// stays; a device or a pipe is written as it is.
///
/// # Errors
/// As the system says.
pub fn write(file: &Path, contents: &[u8]) -> Result<()> {
    let Some(target) = replaceable(file)? else { return fs::write(file, contents) };
    let mut partial = target.clone().into_os_string();
    partial.push(".partial");
    fs::write(&partial, contents).and_then(|()| fs::rename(&partial, &target))
}

/// The regular file that `file` is or will be; `None` where it is something that must not be replaced.
fn replaceable(file: &Path) -> Result<Option<PathBuf>> {
    match fs::canonicalize(file) {
        Ok(target) => Ok(fs::metadata(&target)?.is_file().then_some(target)),
        // A link to nothing is filled through the link.
        Err(error) if error.kind() == ErrorKind::NotFound => Ok((!file.is_symlink()).then(|| file.to_owned())),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_that_has_no_place_is_refused_before_the_work() {
        for file in ["record.json", "./record.json", "/dev/null", "/record.json"] {
            assert_eq!(check("output", file), Ok(()), "{file}");
        }
        for (file, part) in [("/none/x.json", "there is no folder /none"), ("/", "it is a folder")] {
            let error = check("output", file).unwrap_err().to_string();
            assert!(error.starts_with(&format!("--output {file}: ")) && error.contains(part), "{error}");
        }
    }

    #[test]
    fn a_device_is_no_file_to_replace_and_a_link_stays_a_link() {
        assert_eq!(replaceable(Path::new("/dev/null")).unwrap(), None);
        let folder = std::env::temp_dir().join(format!("tensorfold-output-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (file, link) = (folder.join("record.json"), folder.join("link"));
        std::os::unix::fs::symlink(&file, &link).unwrap();
        write(&link, b"through a link to nothing").unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"through a link to nothing");
        write(&link, b"replaced").unwrap();
        assert!(link.is_symlink());
        assert_eq!(fs::read(&file).unwrap(), b"replaced");
        assert_eq!(replaceable(&folder).unwrap(), None, "a folder");
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 2, "no partial file is left");
        fs::remove_dir_all(&folder).unwrap();
    }
}
