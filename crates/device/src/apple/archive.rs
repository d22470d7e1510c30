//! Compiled pipelines on disk: one file a program, whose name says what it was compiled from and what it holds.
//!
//! `NAME-KEY-CONTENT.bin`: the key is a digest of the source, the compiler's settings, the GPU family and the build of the
//! system; the content is a digest of the file itself. So a torn file, one that somebody changed and one of another system are
//! known before Metal sees them, and one rename makes a file whole. What doesn't fit is deleted where it is ours by its name.
//! A missing or bad archive costs time, never a wrong kernel.

use sha2::{Digest, Sha256};
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

const ENDING: &str = ".bin";
const TEMPORARY: &str = ".tmp";
/// Hexadecimal digits of each digest in a name.
const DIGITS: usize = 32;
/// A larger file is none of ours.
const BYTES_MAX: u64 = 256 << 20;

/// What a program is compiled from and for.
#[derive(Clone, Copy, Debug)]
pub struct Made<'a> {
    /// The whole text that the compiler gets.
    pub source: &'a str,
    /// Language version, math mode and whatever else changes the code.
    pub settings: &'a str,
    /// The GPU family: `apple9`.
    pub target: &'a str,
    /// The build of the system, with which its compiler comes: `24A335`.
    pub system: &'a str,
}

/// The digest of what a program is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key(String);

impl Key {
    /// The same for the same parts alone.
    pub fn of(made: &Made<'_>) -> Key {
        let mut digest = Sha256::new();
        for part in [made.source, made.settings, made.target, made.system] {
            digest.update((part.len() as u64).to_le_bytes());
            digest.update(part);
        }
        Key(hex(digest))
    }
}

/// Why an archive could not be kept. The program runs on without it.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    #[error("the folder of compiled pipelines {folder}: {source}; the next start compiles again")]
    Folder { folder: String, source: io::Error },
    #[error("Metal wrote no archive of `{program}`: {text}; the next start compiles again")]
    Written { program: String, text: String },
}

/// The folder of compiled pipelines.
#[derive(Clone, Debug)]
pub struct Shelf {
    folder: PathBuf,
}

impl Shelf {
    /// Of a folder that need not exist yet.
    pub fn new(folder: PathBuf) -> Shelf {
        Shelf { folder }
    }

    /// The whole archive of a program that was made so. Deletes archives of it that are torn or made otherwise.
    pub fn find(&self, program: &str, key: &Key) -> Option<PathBuf> {
        let mut found = None;
        for path in self.files_of(program) {
            match found.is_none() && is_whole(&path, program, key) {
                true => found = Some(path),
                // Another process may have been faster.
                false => drop(fs::remove_file(path)),
            }
        }
        found
    }

    /// Keeps what `write` puts into the file it is given, in place of all archives of the program. Readers see the old file or
    /// the new one, never a part.
    ///
    /// # Errors
    /// [`ArchiveError`]; nothing is left behind then.
    pub fn keep(
        &self,
        program: &str,
        key: &Key,
        write: impl FnOnce(&Path) -> Result<(), String>,
    ) -> Result<PathBuf, ArchiveError> {
        let failed = |source| ArchiveError::Folder { folder: self.folder.display().to_string(), source };
        fs::create_dir_all(&self.folder).map_err(failed)?;
        let temporary = self.folder.join(format!("{program}-{}{TEMPORARY}", std::process::id()));
        // One of a process that died with this number.
        drop(fs::remove_file(&temporary));
        let written = write(&temporary).map_err(|text| ArchiveError::Written { program: program.to_owned(), text });
        let named = written.and_then(|()| {
            let content = digest_of(&temporary).map_err(failed)?;
            let path = self.folder.join(format!("{program}-{}-{content}{ENDING}", key.0));
            fs::File::open(&temporary).and_then(|file| file.sync_all()).map_err(failed)?;
            fs::rename(&temporary, &path).map_err(failed)?;
            Ok(path)
        });
        match &named {
            Ok(path) => self.files_of(program).filter(|other| other != path).for_each(|old| drop(fs::remove_file(old))),
            Err(_) => drop(fs::remove_file(&temporary)),
        }
        named
    }

    /// Deletes an archive that Metal refuses.
    pub fn drop_file(&self, path: &Path) {
        drop(fs::remove_file(path));
    }

    /// Files whose names are those of archives of this program; others are not ours to touch.
    fn files_of(&self, program: &str) -> impl Iterator<Item = PathBuf> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().filter_map(Result::ok);
        let program = program.to_owned();
        entries.map(|entry| entry.path()).filter(move |path| {
            let name = path.file_name().and_then(|name| name.to_str());
            name.is_some_and(|name| digests_in(name, &program).is_some())
        })
    }
}

/// Key and content digest of a file name of this program.
fn digests_in<'a>(name: &'a str, program: &str) -> Option<(&'a str, &'a str)> {
    let rest = name.strip_prefix(program)?.strip_prefix('-')?.strip_suffix(ENDING)?;
    let (key, content) = rest.split_once('-')?;
    let is_digest = |text: &str| text.len() == DIGITS && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    (is_digest(key) && is_digest(content)).then_some((key, content))
}

fn is_whole(path: &Path, program: &str, key: &Key) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let Some((made, content)) = digests_in(name, program) else { return false };
    made == key.0 && digest_of(path).is_ok_and(|found| found == content)
}

fn digest_of(path: &Path) -> io::Result<String> {
    let file = fs::File::open(path)?;
    if file.metadata()?.len() > BYTES_MAX {
        return Err(io::Error::other("too large for an archive of pipelines"));
    }
    let mut digest = Sha256::new();
    let (mut reader, mut piece) = (file.take(BYTES_MAX), vec![0; 1 << 16]);
    loop {
        match reader.read(&mut piece)? {
            0 => return Ok(hex(digest)),
            count => digest.update(&piece[..count]),
        }
    }
}

fn hex(digest: Sha256) -> String {
    digest.finalize().iter().take(DIGITS / 2).map(|byte| format!("{byte:02x}")).collect()
}

/// Decides when compiled pipelines are written: once, when a round has compiled nothing new.
#[derive(Debug, Default)]
pub struct Settling {
    /// Pipelines compiled since the last write.
    fresh: usize,
    /// Those of them that the last round knew already.
    known: usize,
}

impl Settling {
    /// A pipeline was compiled.
    pub fn compiled(&mut self) {
        self.fresh += 1;
    }

    /// A round has ended. Whether to write now.
    pub fn round_ended(&mut self) -> bool {
        let settled = self.fresh > 0 && self.fresh == self.known;
        if settled {
            *self = Settling::default();
        } else {
            self.known = self.fresh;
        }
        settled
    }

    /// Whether something was compiled and not written.
    pub fn has_fresh(&self) -> bool {
        self.fresh > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let folder = std::env::temp_dir().join(format!("tf-archive-{name}-{}", std::process::id()));
            drop(fs::remove_dir_all(&folder));
            Folder(folder)
        }

        fn names(&self) -> Vec<String> {
            let entries = fs::read_dir(&self.0).into_iter().flatten().filter_map(Result::ok);
            let mut names: Vec<_> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
            names.sort();
            names
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            drop(fs::remove_dir_all(&self.0));
        }
    }

    const MADE: Made<'_> = Made { source: "kernel", settings: "3.1 safe", target: "apple9", system: "24A335" };

    fn writes(bytes: &'static [u8]) -> impl FnOnce(&Path) -> Result<(), String> {
        move |path| fs::write(path, bytes).map_err(|error| error.to_string())
    }

    #[test]
    fn a_key_depends_on_every_part_and_on_their_borders() {
        let others = [
            Made { source: "kernel2", ..MADE },
            Made { settings: "3.1 fast", ..MADE },
            Made { target: "apple10", ..MADE },
            Made { system: "24A336", ..MADE },
            Made { source: "kernel3.1 safe", settings: "", ..MADE },
        ];
        for other in others {
            assert_ne!(Key::of(&MADE), Key::of(&other), "{other:?}");
        }
        assert_eq!(Key::of(&MADE), Key::of(&MADE));
    }

    #[test]
    fn what_was_kept_is_found_and_only_for_the_same_making() {
        let folder = Folder::new("found");
        let shelf = Shelf::new(folder.0.clone());
        let key = Key::of(&MADE);
        assert_eq!(shelf.find("attention", &key), None, "there is no folder yet");
        let kept = shelf.keep("attention", &key, writes(b"code")).expect("kept");
        let other = shelf.keep("attention_draft", &key, writes(b"more")).expect("kept");
        assert_eq!(shelf.find("attention", &key), Some(kept.clone()));
        let again = shelf.keep("attention", &key, writes(b"code and more")).expect("kept");
        assert!(!kept.exists() && other.exists(), "one archive a program, each on its own");
        assert_eq!(shelf.find("attention", &key), Some(again.clone()));
        assert_eq!(shelf.find("attention", &Key::of(&Made { system: "25A1", ..MADE })), None, "another system");
        assert!(!again.exists(), "a stale one goes");
        assert_eq!(folder.names().len(), 1, "{:?}", folder.names());
    }

    #[test]
    fn a_torn_or_changed_file_is_not_found_and_foreign_files_are_not_touched() {
        let folder = Folder::new("torn");
        let shelf = Shelf::new(folder.0.clone());
        let key = Key::of(&MADE);
        for damage in [&b"cod"[..], b"", b"codf", b"code and more"] {
            let kept = shelf.keep("moe", &key, writes(b"code")).expect("kept");
            fs::write(&kept, damage).unwrap();
            assert_eq!(shelf.find("moe", &key), None, "{damage:?}");
            assert!(!kept.exists());
        }
        let foreign = ["moe-notes.bin", "moe.bin", "moe-1.tmp", "x"];
        foreign.iter().for_each(|name| fs::write(folder.0.join(name), b"mine").unwrap());
        assert_eq!(shelf.find("moe", &key), None);
        shelf.keep("moe", &key, writes(b"code")).expect("kept");
        assert_eq!(folder.names().len(), foreign.len() + 1, "{:?}", folder.names());
    }

    #[test]
    fn a_write_that_fails_leaves_the_old_archive_and_no_rest() {
        let folder = Folder::new("failed");
        let shelf = Shelf::new(folder.0.clone());
        let key = Key::of(&MADE);
        let kept = shelf.keep("moe", &key, writes(b"code")).expect("kept");
        let half = |path: &Path| {
            fs::write(path, b"co").unwrap();
            Err("no space".to_owned())
        };
        let text = shelf.keep("moe", &key, half).expect_err("it failed").to_string();
        assert!(text.contains("`moe`: no space"), "{text}");
        let text = shelf.keep("moe", &key, |_| Ok(())).expect_err("nothing was written").to_string();
        assert!(text.contains("the next start compiles again"), "{text}");
        assert_eq!(shelf.find("moe", &key), Some(kept));
        assert_eq!(folder.names().len(), 1, "{:?}", folder.names());
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_an_error_and_no_panic() {
        let folder = Folder::new("blocked");
        fs::write(&folder.0, b"a file").unwrap();
        let shelf = Shelf::new(folder.0.join("below"));
        let key = Key::of(&MADE);
        assert_eq!(shelf.find("moe", &key), None);
        let text = shelf.keep("moe", &key, writes(b"code")).expect_err("there is no folder").to_string();
        assert!(text.starts_with("the folder of compiled pipelines"), "{text}");
        fs::remove_file(&folder.0).unwrap();
    }

    #[test]
    fn pipelines_are_written_once_the_rounds_compile_nothing_new() {
        let mut settling = Settling::default();
        assert!(!settling.round_ended(), "nothing was compiled");
        settling.compiled();
        settling.compiled();
        assert!(!settling.round_ended(), "the round that compiled");
        settling.compiled();
        assert!(!settling.round_ended(), "one more came");
        assert!(settling.has_fresh());
        assert!(settling.round_ended(), "a round without");
        assert!(!settling.round_ended() && !settling.has_fresh(), "once");
        settling.compiled();
        assert!(!settling.round_ended() && settling.round_ended());
    }
}
