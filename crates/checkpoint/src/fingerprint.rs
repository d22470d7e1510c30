//! A digest of what a checkpoint is: the part of a reply's identity that comes from files.
//!
//! Small files and the headers of all shards are hashed with their sizes; a shard's data is hashed where the whole
//! checkpoint is small, and stands by its blob name where the hub's cache has hashed it already.

use std::fmt;
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::error::CheckpointError;
use crate::shards::{Checkpoint, Source};

/// Up to this size the data itself is hashed; it takes well under a second.
const WHOLE_BYTES_MAX: u64 = 64 << 20;

/// SHA-256 of a checkpoint's description.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub [u8; 32]);

impl fmt::Display for Fingerprint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Fingerprint({self})")
    }
}

impl Checkpoint {
    /// Index, configuration, tokenizer, shard headers and file sizes. Independent of where the folder is.
    ///
    /// # Errors
    /// [`CheckpointError::Io`] when a small file can't be read.
    pub fn fingerprint(&self) -> Result<Fingerprint, CheckpointError> {
        let mut digest = Sha256::new();
        let mut add = |name: &str, bytes: &[u8]| {
            for part in [name.as_bytes(), bytes] {
                digest.update((part.len() as u64).to_le_bytes());
                digest.update(part);
            }
        };
        for name in ["config.json", "inference/config.json", "tokenizer.json", "model.safetensors.index.json"] {
            if let Some(bytes) = self.file(name)? {
                add(name, &bytes);
            }
        }
        let whole = self.shards().map(|(_, bytes)| bytes).sum::<u64>() <= WHOLE_BYTES_MAX;
        for shard in self.shard_list() {
            let bytes = shard.bytes.get();
            add(&shard.name, &(bytes.len() as u64).to_le_bytes());
            match whole {
                true => add("data", bytes),
                false => {
                    add("header", &bytes[..8 + shard.header_bytes]);
                    if let Source::Folder(folder) = self.source()
                        && let Some(blob) = blob_name(&folder.join(&shard.name))
                    {
                        add("blob", blob.as_bytes());
                    }
                }
            }
        }
        Ok(Fingerprint(digest.finalize().into()))
    }
}

/// The hash that a hub cache names a large file by: a link into a folder `blobs`.
fn blob_name(path: &Path) -> Option<String> {
    let target = std::fs::read_link(path).ok()?;
    let blobs = target.parent()?.file_name()? == "blobs";
    let name = target.file_name()?.to_str()?;
    let is_hash = name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
    (blobs && is_hash).then(|| name.to_owned())
}
