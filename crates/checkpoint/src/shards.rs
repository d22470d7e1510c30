//! A checkpoint's files: shards mapped read-only, the index that names them, and the small files beside them.
//!
//! Opening reads headers only. Afterwards every view lies inside its file and tensors fill their files without overlap
//! or hole, so nothing later has to ask. Names are the release's: aliases of re-exports are translated here.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use memmap2::Mmap;
use serde::Deserialize;
use serde::de::{self, Deserializer, MapAccess, Visitor};

use crate::config::{Config, GenerationConfig};
use crate::error::CheckpointError;
use crate::header::{self, other_format};
use crate::json;
use crate::view::{Dtype, View};

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
/// Configuration, tokenizer and index files: far above any real one.
const SMALL_FILE_BYTES_MAX: u64 = 512 << 20;

/// The files of a checkpoint inside the program: name and contents.
pub type EmbeddedFiles = &'static [(&'static str, &'static [u8])];

/// An opened checkpoint.
pub struct Checkpoint {
    source: Source,
    shards: Vec<Shard>,
    tensors: Vec<Tensor>,
    by_name: HashMap<String, usize>,
    ignored: Vec<String>,
}

/// Where a tensor's bytes lie on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub path: PathBuf,
    /// The first byte's offset in the file.
    pub start: u64,
    pub bytes: u64,
}

#[derive(Clone)]
pub(crate) enum Source {
    Folder(PathBuf),
    Embedded(EmbeddedFiles),
}

pub(crate) struct Shard {
    pub name: String,
    pub bytes: FileBytes,
    pub header_bytes: usize,
}

struct Tensor {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    shard: usize,
    start: usize,
    end: usize,
}

pub(crate) enum FileBytes {
    Mapped(MappedFile),
    Static(&'static [u8]),
}

/// A mapped file and what it was like then.
pub(crate) struct MappedFile {
    map: Mmap,
    file: File,
    /// `None` where the system doesn't say.
    modified: Option<SystemTime>,
}

impl FileBytes {
    pub fn get(&self) -> &[u8] {
        match self {
            FileBytes::Mapped(file) => &file.map,
            FileBytes::Static(bytes) => bytes,
        }
    }
}

impl Shard {
    fn check_unchanged(&self) -> Result<(), CheckpointError> {
        let FileBytes::Mapped(file) = &self.bytes else { return Ok(()) };
        match file.change() {
            None => Ok(()),
            Some(how) => Err(CheckpointError::Changed { file: self.name.clone(), how }),
        }
    }
}

impl MappedFile {
    /// What has changed since.
    fn change(&self) -> Option<String> {
        let now = match self.file.metadata() {
            Ok(now) => now,
            Err(error) => return Some(format!("it can't be read: {}", reason(&error))),
        };
        let length = self.map.len() as u64;
        if now.len() != length {
            return Some(format!("it has {} bytes and had {length}", now.len()));
        }
        (now.modified().ok() != self.modified).then(|| "it was written to".to_owned())
    }
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Checkpoint({}, {} tensors)", self.source.describe(), self.tensors.len())
    }
}

impl Checkpoint {
    /// Opens a folder: the index and its shards, or a single `model.safetensors`.
    ///
    /// # Errors
    /// [`CheckpointError`] for a missing, truncated or damaged file; [`CheckpointError::Several`] when more than one
    /// thing is wrong. Only headers are read.
    pub fn open(folder: &Path) -> Result<Checkpoint, CheckpointError> {
        Self::read(Self::folder(folder)?)
    }

    /// Opens a checkpoint that is part of the program.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn embedded(files: EmbeddedFiles) -> Result<Checkpoint, CheckpointError> {
        Self::read(Source::Embedded(files))
    }

    fn folder(folder: &Path) -> Result<Source, CheckpointError> {
        let refused = |reason: &str| CheckpointError::NotAFolder {
            path: folder.display().to_string(),
            reason: reason.to_owned(),
        };
        match std::fs::metadata(folder) {
            Ok(metadata) if metadata.is_dir() => Ok(Source::Folder(folder.to_owned())),
            Ok(_) => Err(refused("this is a file, not a folder")),
            Err(error) => Err(refused(&reason(&error))),
        }
    }

    fn read(source: Source) -> Result<Checkpoint, CheckpointError> {
        let index = match source.small_file(INDEX)? {
            Some(bytes) => Some(read_index(&bytes)?),
            None => None,
        };
        let names: Vec<String> = match &index {
            Some(index) => index.shards.keys().cloned().collect(),
            None if source.has(SINGLE) => vec![SINGLE.to_owned()],
            None => return Err(source.no_weights()),
        };
        let missing: Vec<&str> = names.iter().filter(|name| !source.has(name)).map(String::as_str).collect();
        if !missing.is_empty() {
            let mut shown = missing[..missing.len().min(5)].join(", ");
            if missing.len() > 5 {
                shown += ", ...";
            }
            let (missing, count) = (missing.len(), names.len());
            return Err(CheckpointError::MissingShards { folder: source.describe(), missing, count, names: shown });
        }

        let mut checkpoint = Checkpoint {
            source,
            shards: Vec::new(),
            tensors: Vec::new(),
            by_name: HashMap::new(),
            ignored: Vec::new(),
        };
        let mut errors = Vec::new();
        for name in names {
            if let Err(error) = checkpoint.add_shard(name, index.as_ref()) {
                errors.push(error);
            }
        }
        if errors.is_empty()
            && let Some(index) = &index
        {
            checkpoint.compare_with_index(index, &mut errors);
        }
        match errors.len() {
            0 => Ok(checkpoint),
            1 => Err(errors.remove(0)),
            _ => Err(CheckpointError::Several(errors)),
        }
    }

    fn add_shard(&mut self, name: String, index: Option<&Index>) -> Result<(), CheckpointError> {
        let bytes = self.source.map(&name)?;
        let (entries, header_bytes) = header::read(&name, bytes.get())?;
        let shard = self.shards.len();
        for entry in entries {
            if let Some(index) = index
                && !index.has(&entry.name, &name)
            {
                return Err(match index.shard_of(&entry.name) {
                    Some(listed) => CheckpointError::NotInShard {
                        index: INDEX.to_owned(),
                        tensor: entry.name,
                        shard: listed.to_owned(),
                        elsewhere: format!(": it is in {name}"),
                    },
                    None => CheckpointError::NotInIndex { index: INDEX.to_owned(), tensor: entry.name, shard: name },
                });
            }
            let Some(canonical) = canonical(&entry.name) else {
                self.ignored.push(entry.name);
                continue;
            };
            if let Some(first) = self.by_name.get(&canonical) {
                let first = self.shards.get(self.tensors[*first].shard).map_or(name.as_str(), |shard| &shard.name);
                return Err(CheckpointError::Repeated { tensor: canonical, first: first.to_owned(), second: name });
            }
            self.by_name.insert(canonical.clone(), self.tensors.len());
            let (dtype, shape, start, end) = (entry.dtype, entry.shape, entry.start, entry.end);
            self.tensors.push(Tensor { name: canonical, dtype, shape, shard, start, end });
        }
        self.shards.push(Shard { name, bytes, header_bytes });
        Ok(())
    }

    /// Every tensor of the index must have been met.
    fn compare_with_index(&self, index: &Index, errors: &mut Vec<CheckpointError>) {
        let ignored: HashSet<&str> = self.ignored.iter().map(String::as_str).collect();
        for (shard, tensors) in &index.shards {
            for tensor in tensors {
                let known = canonical(tensor).is_some_and(|name| self.by_name.contains_key(&name));
                if !known && !ignored.contains(tensor.as_str()) {
                    errors.push(CheckpointError::NotInShard {
                        index: INDEX.to_owned(),
                        tensor: tensor.clone(),
                        shard: shard.clone(),
                        elsewhere: String::new(),
                    });
                }
            }
        }
    }

    /// The tensor of this name, if the checkpoint has it.
    pub fn view(&self, name: &str) -> Option<View<'_>> {
        self.by_name.get(name).map(|index| self.view_of(&self.tensors[*index]))
    }

    /// Where a tensor lies on disk. `None` for a name that the checkpoint doesn't have, and where it is part of the program.
    pub fn place(&self, name: &str) -> Option<Place> {
        let tensor = &self.tensors[*self.by_name.get(name)?];
        let path = self.path()?.join(&self.shards[tensor.shard].name);
        Some(Place { path, start: tensor.start as u64, bytes: (tensor.end - tensor.start) as u64 })
    }

    /// Asks the system whether the files of these tensors are what they were when they were opened. To read a mapped file
    /// beyond its end ends the program, so whoever reads one for long asks before.
    ///
    /// # Errors
    /// [`CheckpointError::Changed`] for the first file that is shorter, longer, was written to, or can't be asked.
    pub fn check_unchanged<'n>(&self, names: impl IntoIterator<Item = &'n str>) -> Result<(), CheckpointError> {
        let tensors = names.into_iter().filter_map(|name| self.by_name.get(name)).map(|index| &self.tensors[*index]);
        tensors.map(|tensor| &self.shards[tensor.shard]).try_for_each(Shard::check_unchanged)
    }

    /// As [`Checkpoint::check_unchanged`], of every file.
    ///
    /// # Errors
    /// As [`Checkpoint::check_unchanged`].
    pub fn check_all_unchanged(&self) -> Result<(), CheckpointError> {
        self.shards.iter().try_for_each(Shard::check_unchanged)
    }

    /// All tensors, in file order.
    pub fn views(&self) -> impl ExactSizeIterator<Item = View<'_>> {
        self.tensors.iter().map(|tensor| self.view_of(tensor))
    }

    /// The bytes of one file from the first of these tensors to the end of the last, whatever lies between them. `None` where
    /// they lie in several files, where one is missing, or without names.
    pub fn span<'n>(&self, names: impl IntoIterator<Item = &'n str>) -> Option<&[u8]> {
        let mut span: Option<(usize, usize, usize)> = None;
        for name in names {
            let tensor = &self.tensors[*self.by_name.get(name)?];
            let (shard, start, end) = span.unwrap_or((tensor.shard, tensor.start, tensor.end));
            if shard != tensor.shard {
                return None;
            }
            span = Some((shard, start.min(tensor.start), end.max(tensor.end)));
        }
        let (shard, start, end) = span?;
        Some(&self.shards[shard].bytes.get()[start..end])
    }

    fn view_of<'a>(&'a self, tensor: &'a Tensor) -> View<'a> {
        let shard = &self.shards[tensor.shard];
        View {
            name: &tensor.name,
            dtype: tensor.dtype,
            shape: &tensor.shape,
            bytes: &shard.bytes.get()[tensor.start..tensor.end],
            file: &shard.name,
        }
    }

    /// Names that were left out because they are tied to the backbone (`mtp.N.embed.*`, `mtp.N.head.*`).
    pub fn ignored(&self) -> &[String] {
        &self.ignored
    }

    /// Shards and their sizes in bytes.
    pub fn shards(&self) -> impl ExactSizeIterator<Item = (&str, u64)> {
        self.shards.iter().map(|shard| (shard.name.as_str(), shard.bytes.get().len() as u64))
    }

    pub(crate) fn shard_list(&self) -> &[Shard] {
        &self.shards
    }

    pub(crate) fn source(&self) -> &Source {
        &self.source
    }

    /// The folder, or `None` for a checkpoint inside the program.
    pub fn path(&self) -> Option<&Path> {
        match &self.source {
            Source::Folder(folder) => Some(folder),
            Source::Embedded(_) => None,
        }
    }

    /// The contents of a small file beside the shards (`tokenizer.json`), if it is there.
    ///
    /// # Errors
    /// [`CheckpointError::Io`] when it is there and can't be read.
    pub fn file(&self, name: &str) -> Result<Option<Vec<u8>>, CheckpointError> {
        self.source.small_file(name)
    }

    /// As [`Checkpoint::file`], for a file that must be there.
    ///
    /// # Errors
    /// [`CheckpointError::MissingFile`], or [`CheckpointError::Io`].
    pub fn required_file(&self, name: &str) -> Result<Vec<u8>, CheckpointError> {
        self.source.required_file(name)
    }

    /// `config.json`, or `inference/config.json` where only that is there.
    ///
    /// # Errors
    /// [`CheckpointError::MissingFile`] without either, [`CheckpointError::InvalidJson`].
    pub fn config(&self) -> Result<Config, CheckpointError> {
        self.source.config()
    }

    /// `generation_config.json`; empty where there is none.
    ///
    /// # Errors
    /// [`CheckpointError::InvalidJson`].
    pub fn generation_config(&self) -> Result<GenerationConfig, CheckpointError> {
        self.source.generation_config()
    }
}

/// The small files of a checkpoint whose weights aren't needed (rendering a prompt, say).
pub struct SmallFiles {
    source: Source,
}

impl SmallFiles {
    /// # Errors
    /// [`CheckpointError::NotAFolder`].
    pub fn open(folder: &Path) -> Result<SmallFiles, CheckpointError> {
        Ok(SmallFiles { source: Checkpoint::folder(folder)? })
    }

    pub fn embedded(files: EmbeddedFiles) -> SmallFiles {
        SmallFiles { source: Source::Embedded(files) }
    }

    /// As [`Checkpoint::file`].
    ///
    /// # Errors
    /// As [`Checkpoint::file`].
    pub fn file(&self, name: &str) -> Result<Option<Vec<u8>>, CheckpointError> {
        self.source.small_file(name)
    }

    /// As [`Checkpoint::required_file`].
    ///
    /// # Errors
    /// As [`Checkpoint::required_file`].
    pub fn required_file(&self, name: &str) -> Result<Vec<u8>, CheckpointError> {
        self.source.required_file(name)
    }

    /// As [`Checkpoint::config`].
    ///
    /// # Errors
    /// As [`Checkpoint::config`].
    pub fn config(&self) -> Result<Config, CheckpointError> {
        self.source.config()
    }

    /// As [`Checkpoint::generation_config`].
    ///
    /// # Errors
    /// As [`Checkpoint::generation_config`].
    pub fn generation_config(&self) -> Result<GenerationConfig, CheckpointError> {
        self.source.generation_config()
    }
}

impl Source {
    fn describe(&self) -> String {
        match self {
            Source::Folder(folder) => folder.display().to_string(),
            Source::Embedded(_) => "the built-in checkpoint".to_owned(),
        }
    }

    fn has(&self, name: &str) -> bool {
        match self {
            Source::Folder(folder) => folder.join(name).exists(),
            Source::Embedded(files) => files.iter().any(|(file, _)| *file == name),
        }
    }

    /// Why there is nothing to open, with a hint at what is there instead.
    fn no_weights(&self) -> CheckpointError {
        let found = match self {
            Source::Folder(folder) => std::fs::read_dir(folder).ok().and_then(|entries| {
                let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
                let other =
                    |name: &String| [".gguf", ".bin", ".pt", ".pth", ".npz"].iter().any(|end| name.ends_with(end));
                names.filter(other).min()
            }),
            Source::Embedded(_) => None,
        };
        let found = found.map_or_else(String::new, |name| format!(", but {name}, a format that is not read"));
        CheckpointError::NoWeights { folder: self.describe(), found }
    }

    fn open(&self, folder: &Path, name: &str) -> Result<Option<(File, u64)>, CheckpointError> {
        let failed = |reason: String| CheckpointError::Io { file: name.to_owned(), reason };
        let path = folder.join(name);
        // Asked before opening: opening a pipe would wait for its writer.
        let metadata = match std::fs::metadata(&path) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(reason(&error))),
        };
        if !metadata.is_file() {
            return Err(failed("it is not a regular file".to_owned()));
        }
        let file = File::open(&path).map_err(|error| failed(reason(&error)))?;
        Ok(Some((file, metadata.len())))
    }

    pub(crate) fn small_file(&self, name: &str) -> Result<Option<Vec<u8>>, CheckpointError> {
        match self {
            Source::Embedded(files) => {
                Ok(files.iter().find(|(file, _)| *file == name).map(|(_, bytes)| bytes.to_vec()))
            }
            Source::Folder(folder) => {
                let failed = |reason: String| CheckpointError::Io { file: name.to_owned(), reason };
                let Some((file, length)) = self.open(folder, name)? else { return Ok(None) };
                if length > SMALL_FILE_BYTES_MAX {
                    return Err(failed(format!("it has {length} bytes, expected at most {SMALL_FILE_BYTES_MAX}")));
                }
                let mut bytes = Vec::with_capacity(length as usize);
                // The length may have changed since it was asked.
                let read = file.take(SMALL_FILE_BYTES_MAX).read_to_end(&mut bytes);
                read.map_err(|error| failed(reason(&error)))?;
                Ok(Some(bytes))
            }
        }
    }

    fn required_file(&self, name: &str) -> Result<Vec<u8>, CheckpointError> {
        let missing = || CheckpointError::MissingFile { file: name.to_owned(), folder: self.describe() };
        self.small_file(name)?.ok_or_else(missing)
    }

    fn config(&self) -> Result<Config, CheckpointError> {
        for name in ["config.json", "inference/config.json"] {
            if let Some(bytes) = self.small_file(name)? {
                return Config::parse(name, &bytes);
            }
        }
        Err(CheckpointError::MissingFile { file: "config.json".to_owned(), folder: self.describe() })
    }

    fn generation_config(&self) -> Result<GenerationConfig, CheckpointError> {
        let name = "generation_config.json";
        match self.small_file(name)? {
            Some(bytes) => GenerationConfig::parse(name, &bytes),
            None => Ok(GenerationConfig::default()),
        }
    }

    fn map(&self, name: &str) -> Result<FileBytes, CheckpointError> {
        match self {
            Source::Embedded(files) => {
                let found = files.iter().find(|(file, _)| *file == name);
                let missing = || CheckpointError::MissingFile { file: name.to_owned(), folder: self.describe() };
                found.map(|(_, bytes)| FileBytes::Static(bytes)).ok_or_else(missing)
            }
            Source::Folder(folder) => {
                let missing = || CheckpointError::MissingFile { file: name.to_owned(), folder: self.describe() };
                let (file, length) = self.open(folder, name)?.ok_or_else(missing)?;
                if length == 0 {
                    return Err(CheckpointError::Truncated { file: name.to_owned(), found: 0, needed: 8 });
                }
                let failed = |error| CheckpointError::Io { file: name.to_owned(), reason: reason(&error) };
                // SAFETY: the map is read-only and private to this value. Other processes must not shorten the file
                // while it is served, which the documentation asks of the user as every mapping loader does;
                // `Checkpoint::check_unchanged` finds out before most reads would.
                let map = unsafe { Mmap::map(&file) }.map_err(failed)?;
                let modified = file.metadata().ok().and_then(|metadata| metadata.modified().ok());
                Ok(FileBytes::Mapped(MappedFile { map, file, modified }))
            }
        }
    }
}

/// An operating system's error without its code.
fn reason(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::NotFound => "there is no such file or folder".to_owned(),
        std::io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
        _ => error.to_string(),
    }
}

/// The release's name for a tensor; `None` for one that is tied to the backbone and therefore left out.
fn canonical(name: &str) -> Option<String> {
    let name = name.strip_prefix("model.").unwrap_or(name);
    let vision = name.starts_with("vision.");
    let parts: Vec<&str> = name
        .split('.')
        .map(|part| match part {
            "self_attn" if !vision => "attn",
            "mlp" if !vision => "ffn",
            "weight_scale_inv" => "scale",
            "e_score_correction_bias" => "bias",
            other => other,
        })
        .collect();
    match parts[..] {
        ["mtp", _, "embed" | "head", _] => None,
        _ => Some(parts.join(".")),
    }
}

/// `weight_map` by shard. Shards in name order, so that errors come in a fixed order.
struct Index {
    shards: BTreeMap<String, HashSet<String>>,
}

impl Index {
    fn has(&self, tensor: &str, shard: &str) -> bool {
        self.shards.get(shard).is_some_and(|tensors| tensors.contains(tensor))
    }

    fn shard_of(&self, tensor: &str) -> Option<&str> {
        self.shards.iter().find(|(_, tensors)| tensors.contains(tensor)).map(|(shard, _)| shard.as_str())
    }
}

fn read_index(bytes: &[u8]) -> Result<Index, CheckpointError> {
    #[derive(Deserialize)]
    struct File {
        weight_map: Pairs,
    }
    let invalid = |reason: String| CheckpointError::InvalidJson { file: INDEX.to_owned(), reason };
    if let Some(found) = other_format(bytes) {
        return Err(CheckpointError::UnreadFormat { file: INDEX.to_owned(), found: found.to_owned() });
    }
    let file: File = serde_json::from_slice(bytes).map_err(|error| json::error(INDEX, &error))?;
    let mut index = Index { shards: BTreeMap::new() };
    let mut seen = HashSet::new();
    for (tensor, shard) in file.weight_map.0 {
        if !is_plain_shard_name(&shard) {
            return Err(CheckpointError::ShardName { file: INDEX.to_owned(), tensor, shard });
        }
        if !seen.insert(tensor.clone()) {
            return Err(CheckpointError::Repeated { tensor, first: INDEX.to_owned(), second: INDEX.to_owned() });
        }
        index.shards.entry(shard).or_default().insert(tensor);
    }
    match index.shards.is_empty() {
        true => Err(invalid("weight_map is empty, expected the tensors of the checkpoint".to_owned())),
        false => Ok(index),
    }
}

/// An index may name files of its own folder only.
fn is_plain_shard_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    name.ends_with(".safetensors") && !name.starts_with('.') && name.len() <= 255 && name.bytes().all(plain)
}

/// An object's entries in order, repeated keys included.
struct Pairs(Vec<(String, String)>);

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Vec<(String, String)>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object from tensor to shard")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
                let mut pairs = Vec::new();
                while let Some(tensor) = entries.next_key::<String>()? {
                    let shard = entries
                        .next_value::<String>()
                        .map_err(|error| de::Error::custom(format_args!("{tensor:?}: {error}")))?;
                    pairs.push((tensor, shard));
                }
                Ok(pairs)
            }
        }
        deserializer.deserialize_map(Entries).map(Pairs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_re_exports_become_the_releases_names() {
        for (found, expected) in [
            ("layers.0.attn.wkv.weight", Some("layers.0.attn.wkv.weight")),
            ("model.layers.0.self_attn.wkv.weight_scale_inv", Some("layers.0.attn.wkv.scale")),
            ("model.layers.3.mlp.gate.e_score_correction_bias", Some("layers.3.ffn.gate.bias")),
            ("vision.blocks.0.mlp.w1.weight", Some("vision.blocks.0.mlp.w1.weight")),
            ("model.vision.blocks.0.mlp.w1.weight", Some("vision.blocks.0.mlp.w1.weight")),
            ("mtp.0.embed.weight", None),
            ("model.mtp.2.head.weight", None),
            ("mtp.2.markov_head.head.weight", Some("mtp.2.markov_head.head.weight")),
            ("head.weight", Some("head.weight")),
        ] {
            assert_eq!(canonical(found).as_deref(), expected, "{found}");
        }
    }

    #[test]
    fn an_index_names_files_of_its_own_folder_only() {
        for (name, plain) in [
            ("model-00001-of-00048.safetensors", true),
            ("../model.safetensors", false),
            ("/etc/model.safetensors", false),
            ("a/b.safetensors", false),
            ("a\\b.safetensors", false),
            ("C:model.safetensors", false),
            ("..safetensors", false),
            (".safetensors", false),
            ("model.gguf", false),
            ("a\0b.safetensors", false),
            ("", false),
        ] {
            assert_eq!(is_plain_shard_name(name), plain, "{name:?}");
        }
    }
}
