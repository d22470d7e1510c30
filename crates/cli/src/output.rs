//! Files that the user names for results.

use std::fs;
use std::io::{ErrorKind, Result};
use std::path::{Path, PathBuf};

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
