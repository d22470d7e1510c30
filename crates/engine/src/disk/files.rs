//! The few things that are asked of a directory. Two kinds exist: a real one, and that of the simulator, which can fail.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::DiskError;

/// A flat directory; clones are the same one. Names come from [`super::FileId`] alone, so none can lead out of it.
pub trait Files: Clone + Send {
    /// A file that is being written.
    type Writing: Send;
    /// A file that is being read from its start.
    type Reading: Send;

    /// Names and lengths of the plain files.
    ///
    /// # Errors
    /// As the system says.
    fn list(&mut self) -> io::Result<Vec<(String, u64)>>;

    /// A new file; one that exists is an error.
    ///
    /// # Errors
    /// As the system says.
    fn create(&mut self, name: &str) -> io::Result<Self::Writing>;

    /// Adds bytes at the end.
    ///
    /// # Errors
    /// As the system says: a full disk among others.
    fn append(&mut self, file: &mut Self::Writing, bytes: &[u8]) -> io::Result<()>;

    /// Returns when everything that was appended would outlive the machine.
    ///
    /// # Errors
    /// As the system says.
    fn sync(&mut self, file: &mut Self::Writing) -> io::Result<()>;

    /// Gives a file its final name, at once and for good.
    ///
    /// # Errors
    /// As the system says.
    fn rename(&mut self, from: &str, to: &str) -> io::Result<()>;

    /// # Errors
    /// As the system says.
    fn remove(&mut self, name: &str) -> io::Result<()>;

    /// # Errors
    /// As the system says; a link is not followed.
    fn open(&mut self, name: &str) -> io::Result<(Self::Reading, u64)>;

    /// Fills `bytes` with what comes next.
    ///
    /// # Errors
    /// As the system says, and where the file ends before.
    fn read(&mut self, file: &mut Self::Reading, bytes: &mut [u8]) -> io::Result<()>;

    /// What the disk has left for this user.
    ///
    /// # Errors
    /// As the system says.
    fn free_bytes(&mut self) -> io::Result<u64>;
}

/// The file that is locked.
const LOCK: &str = "tensorfold.lock";

/// A directory of this machine, held by this process alone for as long as it is open.
#[derive(Clone, Debug)]
pub struct Folder {
    dir: PathBuf,
    handle: Arc<File>,
    /// Unlocked by the system when the process ends, however it ends.
    _lock: Arc<File>,
}

impl Folder {
    /// Makes the directory where it isn't there, readable by this user alone, and locks it.
    ///
    /// # Errors
    /// [`DiskError`] when it can't be used, or another process has it.
    pub fn open(dir: &Path) -> Result<Folder, DiskError> {
        let fail = |error| DiskError::Folder { dir: dir.to_path_buf(), error };
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(fail)?;
        let lock = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(dir.join(LOCK));
        let lock = lock.map_err(fail)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(DiskError::InUse { dir: dir.to_path_buf() }),
            Err(TryLockError::Error(error)) => return Err(fail(error)),
        }
        let handle = Arc::new(File::open(dir).map_err(fail)?);
        Ok(Folder { dir: dir.to_path_buf(), handle, _lock: Arc::new(lock) })
    }
}

impl Folder {
    /// Whether [`Folder::open`] would do now: it is done, and what it made is removed again.
    ///
    /// # Errors
    /// As [`Folder::open`], and where the directory can't be listed.
    pub fn check(dir: &Path) -> Result<(), DiskError> {
        let above = dir.ancestors().take_while(|folder| !folder.as_os_str().is_empty());
        let missing: Vec<&Path> = above.take_while(|folder| !folder.exists()).collect();
        let lock = dir.join(LOCK);
        let had_lock = lock.exists();
        let checked = Folder::open(dir).and_then(|mut folder| {
            let listed = folder.list().map(|_| ());
            // While it is still locked, so that nobody else has locked it by then.
            if !had_lock {
                let _ = std::fs::remove_file(&lock);
            }
            listed.map_err(|error| DiskError::Folder { dir: dir.to_path_buf(), error })
        });
        // What can't be removed is found by the next start as it is.
        missing.into_iter().for_each(|folder| drop(std::fs::remove_dir(folder)));
        checked
    }
}

/// A link in a file's place isn't followed, and a pipe in its place isn't waited for.
const PLAIN: i32 = rustix::fs::OFlags::NOFOLLOW.union(rustix::fs::OFlags::NONBLOCK).bits() as i32;

impl Files for Folder {
    type Writing = File;
    type Reading = File;

    fn list(&mut self) -> io::Result<Vec<(String, u64)>> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&self.dir)? {
            let entry = entry?;
            // An entry may go while others are listed; what isn't there isn't listed.
            let Ok(about) = entry.metadata() else { continue };
            if let (true, Ok(name)) = (about.is_file(), entry.file_name().into_string()) {
                found.push((name, about.len()));
            }
        }
        Ok(found)
    }

    fn create(&mut self, name: &str) -> io::Result<File> {
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(self.dir.join(name))
    }

    fn append(&mut self, file: &mut File, bytes: &[u8]) -> io::Result<()> {
        file.write_all(bytes)
    }

    fn sync(&mut self, file: &mut File) -> io::Result<()> {
        file.sync_all()
    }

    fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
        std::fs::rename(self.dir.join(from), self.dir.join(to))?;
        self.handle.sync_all()
    }

    fn remove(&mut self, name: &str) -> io::Result<()> {
        std::fs::remove_file(self.dir.join(name))
    }

    fn open(&mut self, name: &str) -> io::Result<(File, u64)> {
        let file = OpenOptions::new().read(true).custom_flags(PLAIN).open(self.dir.join(name))?;
        let about = file.metadata()?;
        if !about.is_file() {
            return Err(io::Error::other("it is no plain file"));
        }
        Ok((file, about.len()))
    }

    fn read(&mut self, file: &mut File, bytes: &mut [u8]) -> io::Result<()> {
        file.read_exact(bytes)
    }

    fn free_bytes(&mut self) -> io::Result<u64> {
        let about = rustix::fs::fstatvfs(&self.handle)?;
        Ok(about.f_bavail.saturating_mul(about.f_frsize))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_refuses_what_opening_would_and_leaves_nothing_behind() {
        let root = std::env::temp_dir().join(format!("tensorfold-folder-check-{}", std::process::id()));
        std::fs::create_dir_all(&root).unwrap();
        let deep = root.join("a/b/c");
        Folder::check(&deep).unwrap();
        assert_eq!(std::fs::read_dir(&root).unwrap().count(), 0, "folders were left");
        std::fs::create_dir(root.join("there")).unwrap();
        Folder::check(&root.join("there")).unwrap();
        assert_eq!(std::fs::read_dir(root.join("there")).unwrap().count(), 0, "a lock was left");
        let open = Folder::open(&deep).unwrap();
        assert!(matches!(Folder::check(&deep), Err(DiskError::InUse { .. })));
        drop(open);
        Folder::check(&deep).unwrap();
        assert!(deep.join(LOCK).exists(), "a lock that was there stays");
        std::fs::write(root.join("file"), b"").unwrap();
        for dir in ["file", "file/below"] {
            assert!(matches!(Folder::check(&root.join(dir)), Err(DiskError::Folder { .. })), "{dir}");
        }
        std::fs::remove_dir_all(&root).unwrap();
    }
}
