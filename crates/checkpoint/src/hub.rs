//! The Hugging Face cache on disk: which repositories, revisions and files are there. Reads names only; opens no socket.

use std::path::{Path, PathBuf};

/// A cache folder: `models--ORG--NAME/{blobs,refs,snapshots}` below `root`.
#[derive(Clone, Debug)]
pub struct HubCache {
    root: PathBuf,
}

/// One revision of a repository that is in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubSnapshot {
    /// `org/name`.
    pub name: String,
    pub commit: String,
    /// Branches and tags that point to it.
    pub references: Vec<String>,
    pub folder: PathBuf,
}

/// Why a name isn't a folder of the cache.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HubError {
    #[error("{name:?} is not a repository name, expected org/name or org/name@revision")]
    Name { name: String },
    #[error("{name} at {revision} is not in the cache {root}{known}")]
    Missing { name: String, revision: String, root: String, known: String },
}

impl HubCache {
    pub fn new(root: impl Into<PathBuf>) -> HubCache {
        HubCache { root: root.into() }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The folder of `org/name` at a branch, tag or commit.
    ///
    /// # Errors
    /// [`HubError`] when the name is malformed or that revision isn't in the cache.
    pub fn find(&self, name: &str, revision: &str) -> Result<PathBuf, HubError> {
        let malformed = || HubError::Name { name: name.to_owned() };
        let (organisation, repository) = name.split_once('/').ok_or_else(malformed)?;
        if ![organisation, repository].iter().all(|part| is_name_part(part)) || !is_revision(revision) {
            return Err(malformed());
        }
        let folder = self.root.join(format!("models--{organisation}--{repository}"));
        let commit = std::fs::read_to_string(folder.join("refs").join(revision)).ok();
        let commit = commit.as_deref().map_or(revision, str::trim);
        let snapshot = folder.join("snapshots").join(commit);
        match is_name_part(commit) && snapshot.is_dir() {
            true => Ok(snapshot),
            false => {
                let others = self.snapshots().into_iter().filter(|snapshot| snapshot.name == name);
                let mut known: Vec<String> = others.flat_map(|snapshot| snapshot.references).collect();
                known.sort();
                let known = match known.is_empty() {
                    true => String::new(),
                    false => format!("; there is {}", known.join(", ")),
                };
                let root = self.root.display().to_string();
                Err(HubError::Missing { name: name.to_owned(), revision: revision.to_owned(), root, known })
            }
        }
    }

    /// Every revision of every repository in the cache, by name. An unreadable folder counts as empty.
    pub fn snapshots(&self) -> Vec<HubSnapshot> {
        let mut found = Vec::new();
        for (entry, folder) in folders(&self.root) {
            let Some((organisation, name)) = entry.strip_prefix("models--").and_then(|name| name.split_once("--"))
            else {
                continue;
            };
            let references = references(&folder.join("refs"), "");
            for (commit, snapshot) in folders(&folder.join("snapshots")) {
                let points_here = |reference: &&(String, String)| reference.1 == commit;
                found.push(HubSnapshot {
                    name: format!("{organisation}/{name}"),
                    references: references.iter().filter(points_here).map(|(name, _)| name.clone()).collect(),
                    commit,
                    folder: snapshot,
                });
            }
        }
        found.sort_by(|left, right| (&left.name, &left.commit).cmp(&(&right.name, &right.commit)));
        found
    }
}

fn folders(path: &Path) -> Vec<(String, PathBuf)> {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.path().is_dir())
        .filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path())))
        .collect()
}

/// Names below `refs` and the commit each holds. A branch name may have slashes.
fn references(path: &Path, prefix: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(path).into_iter().flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let name = format!("{prefix}{name}");
        // Two levels are as deep as the hub's names go (refs/pr/1 is stored as pr/1).
        match entry.path().is_dir() {
            true if prefix.matches('/').count() < 4 => found.extend(references(&entry.path(), &format!("{name}/"))),
            true => {}
            false => {
                let commit = std::fs::read_to_string(entry.path()).unwrap_or_default();
                found.push((name, commit.trim().to_owned()));
            }
        }
    }
    found.sort();
    found
}

/// A part of a repository's name or a commit: nothing that could leave the folder it is joined to.
fn is_name_part(part: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    !part.is_empty() && part.len() <= 96 && part.bytes().all(plain) && !part.starts_with('.') && !part.contains("--")
}

fn is_revision(revision: &str) -> bool {
    revision.split('/').all(is_name_part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_revisions_lead_to_snapshots() {
        let root = std::env::temp_dir().join(format!("tensorfold-hub-{}", std::process::id()));
        let repository = root.join("models--org--name");
        for folder in ["snapshots/abc123", "snapshots/def456", "refs/refs/pr"] {
            std::fs::create_dir_all(repository.join(folder)).unwrap();
        }
        std::fs::write(repository.join("refs/main"), "abc123\n").unwrap();
        std::fs::write(repository.join("refs/refs/pr/1"), "def456").unwrap();
        let cache = HubCache::new(&root);
        for (revision, commit) in [("main", "abc123"), ("abc123", "abc123"), ("refs/pr/1", "def456")] {
            assert_eq!(cache.find("org/name", revision).unwrap(), repository.join("snapshots").join(commit));
        }
        let error = cache.find("org/name", "other").unwrap_err().to_string();
        assert!(error.contains("there is main, refs/pr/1"), "{error}");
        for name in ["name", "org/../name", "../name", "org/", "/name", "org/a/b", "org/.."] {
            assert!(matches!(cache.find(name, "main"), Err(HubError::Name { .. })), "{name}");
        }
        assert!(cache.find("org/name", "../../x").is_err());
        let listed: Vec<(String, Vec<String>)> =
            cache.snapshots().into_iter().map(|snapshot| (snapshot.commit, snapshot.references)).collect();
        let expected =
            [("abc123".to_owned(), vec!["main".to_owned()]), ("def456".to_owned(), vec!["refs/pr/1".to_owned()])];
        assert_eq!(listed, expected);
        std::fs::remove_dir_all(&root).unwrap();
    }
}
