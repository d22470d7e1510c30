//! Finds what a MODEL argument means: a folder, a name in the hub cache, or the checkpoint inside the program.

use std::path::{Path, PathBuf};

use tf_checkpoint::{Checkpoint, CheckpointError, HubCache, HubError, SmallFiles};

use crate::demo;
use crate::options::Environment;

/// Where a model's files are, and what it is called in replies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Located {
    pub name: String,
    pub place: Place,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    BuiltIn,
    Folder(PathBuf),
    Hub { folder: PathBuf, revision: String },
}

/// Why a MODEL argument leads nowhere.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LocateError {
    #[error("{path} is not a folder. A checkpoint is a folder with config.json and safetensors files")]
    NoFolder { path: String },
    #[error(
        "{name} is not a model here. Give a folder, org/name from the hub cache, or {}; `tensorfold models` lists them",
        demo::NAME
    )]
    Unknown { name: String },
    #[error("no folder for the hub cache: set HF_HUB_CACHE, HF_HOME or HOME, or give the model's folder")]
    NoCache,
    #[error("{0}. Downloads aren't built yet: fetch it with a hub client, or give the model's folder")]
    Hub(#[from] HubError),
}

impl LocateError {
    /// 2 where the argument is wrong by itself, 1 where the machine lacks what it names.
    pub fn exit_code(&self) -> u8 {
        match self {
            LocateError::NoFolder { .. } | LocateError::Unknown { .. } | LocateError::Hub(HubError::Name { .. }) => 2,
            LocateError::NoCache | LocateError::Hub(HubError::Missing { .. }) => 1,
        }
    }
}

impl Located {
    /// Opens the checkpoint and judges its headers.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn open(&self) -> Result<Checkpoint, CheckpointError> {
        match &self.place {
            Place::BuiltIn => Checkpoint::embedded(demo::FILES),
            Place::Folder(folder) | Place::Hub { folder, .. } => Checkpoint::open(folder),
        }
    }

    /// Opens the files beside the weights only.
    ///
    /// # Errors
    /// As [`SmallFiles::open`].
    pub fn small_files(&self) -> Result<SmallFiles, CheckpointError> {
        match &self.place {
            Place::BuiltIn => Ok(SmallFiles::embedded(demo::FILES)),
            Place::Folder(folder) | Place::Hub { folder, .. } => SmallFiles::open(folder),
        }
    }

    /// For people: where it is.
    pub fn describe(&self) -> String {
        match &self.place {
            Place::BuiltIn => "part of the program".to_owned(),
            Place::Folder(folder) => folder.display().to_string(),
            Place::Hub { folder, revision } => format!("hub cache, {revision}: {}", folder.display()),
        }
    }
}

/// The hub cache's folder: `HF_HUB_CACHE`, `HF_HOME/hub`, or the user's cache folder.
pub fn hub_cache(environment: &Environment) -> Option<HubCache> {
    let below = |variable: &str, path: &str| environment.get(variable).map(|folder| Path::new(folder).join(path));
    below("HF_HUB_CACHE", "")
        .or_else(|| below("HF_HOME", "hub"))
        .or_else(|| below("XDG_CACHE_HOME", "huggingface/hub"))
        .or_else(|| below("HOME", ".cache/huggingface/hub"))
        .map(HubCache::new)
}

/// Whether `text` names a model, so that another first word is a prompt: a folder, a text with `/`, or a name that
/// `models` lists. A text with a space is never a name.
pub fn is_model(text: &str) -> bool {
    text == demo::NAME || Path::new(text).is_dir() || text.contains('/') && !text.contains(char::is_whitespace)
}

/// Finds `text`: an existing folder first, then the built-in name, then `org/name` or `org/name@revision`.
///
/// # Errors
/// [`LocateError`] with the next step.
pub fn locate(text: &str, revision: &str, environment: &Environment) -> Result<Located, LocateError> {
    let path = Path::new(text);
    if path.is_dir() {
        return Ok(Located { name: folder_name(path), place: Place::Folder(path.to_owned()) });
    }
    if text == demo::NAME {
        return Ok(Located { name: demo::NAME.to_owned(), place: Place::BuiltIn });
    }
    let is_path = path.is_absolute() || [".", "~"].iter().any(|start| text.starts_with(start));
    if is_path || path.exists() || text.ends_with('/') {
        return Err(LocateError::NoFolder { path: text.to_owned() });
    }
    let (repository, revision) = text.split_once('@').unwrap_or((text, revision));
    if repository.matches('/').count() != 1 {
        return match repository.contains('/') {
            true => Err(LocateError::NoFolder { path: text.to_owned() }),
            false => Err(LocateError::Unknown { name: text.to_owned() }),
        };
    }
    let cache = hub_cache(environment).ok_or(LocateError::NoCache)?;
    let folder = cache.find(repository, revision)?;
    Ok(Located { name: repository.to_owned(), place: Place::Hub { folder, revision: revision.to_owned() } })
}

/// The last part of a folder's full path.
fn folder_name(path: &Path) -> String {
    let full = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    full.file_name().map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checkpoint_inside_the_program_is_whole() {
        let located = locate(demo::NAME, "main", &Environment::of(&[])).unwrap();
        assert_eq!((located.name.as_str(), &located.place), ("tiny-dsv41", &Place::BuiltIn));
        assert_eq!(located.open().unwrap().views().len(), 1782);
        assert!(located.small_files().unwrap().required_file("tokenizer.json").is_ok());
        assert!(located.small_files().unwrap().required_file("LICENSE-WordNet.txt").is_ok());
    }

    #[test]
    fn a_name_leads_to_a_folder_or_says_what_to_do() {
        let root = std::env::temp_dir().join(format!("tensorfold-locate-{}", std::process::id()));
        let snapshot = root.join("hub/models--org--name/snapshots/abc");
        std::fs::create_dir_all(&snapshot).unwrap();
        std::fs::create_dir_all(root.join("hub/models--org--name/refs")).unwrap();
        std::fs::write(root.join("hub/models--org--name/refs/main"), "abc").unwrap();
        let home = root.display().to_string();
        let environment = Environment::of(&[("HF_HOME", home.as_str())]);
        for (text, revision) in [("org/name", "main"), ("org/name@abc", "abc")] {
            let located = locate(text, "main", &environment).unwrap();
            let place = Place::Hub { folder: snapshot.clone(), revision: revision.to_owned() };
            assert_eq!((located.name.as_str(), located.place), ("org/name", place));
        }
        let folder = locate(&snapshot.display().to_string(), "main", &environment).unwrap();
        assert_eq!((folder.name.as_str(), folder.place), ("abc", Place::Folder(snapshot)));
        for (text, code, part) in [
            ("org/other", 1, "org/other at main is not in the cache"),
            ("org/name@v2", 1, "there is main. Downloads aren't built yet"),
            ("./none", 2, "./none is not a folder"),
            ("/none", 2, "/none is not a folder"),
            ("a/b/c", 2, "a/b/c is not a folder"),
            ("hello", 2, "hello is not a model here"),
            ("org/..", 2, "is not a repository name"),
        ] {
            let error = locate(text, "main", &environment).unwrap_err();
            assert!(error.to_string().contains(part), "{text}: {error}");
            assert_eq!(error.exit_code(), code, "{text}");
        }
        assert_eq!(locate("org/name", "main", &Environment::of(&[])), Err(LocateError::NoCache));
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn the_first_word_of_run_is_a_model_or_a_prompt() {
        for (text, model) in [
            ("tiny-dsv41", true),
            ("org/name", true),
            (".", true),
            ("hello", false),
            ("What is 3/4 of 8?", false),
            ("", false),
        ] {
            assert_eq!(is_model(text), model, "{text}");
        }
    }

    #[test]
    fn the_hub_cache_follows_its_variables_in_order() {
        let all = [("HF_HUB_CACHE", "/a"), ("HF_HOME", "/b"), ("XDG_CACHE_HOME", "/c"), ("HOME", "/d")];
        for (from, expected) in ["/a/", "/b/hub", "/c/huggingface/hub", "/d/.cache/huggingface/hub"].iter().enumerate()
        {
            let cache = hub_cache(&Environment::of(&all[from..])).unwrap();
            assert_eq!(cache.root(), Path::new(expected));
        }
    }
}
