//! The disk tier of the kept prefixes: they survive a restart, and make room in memory without being lost.
//!
//! Two halves talk through bounded queues. The [`Shelf`] lives on the engine's thread, knows which prefix is in which
//! file and what is worth keeping, and never waits. Two [`Worker`]s have the disk's slowness: one writes, and one reads, so
//! that no prompt waits for what is being synced. States and pages are opaque bytes of the model; they cross in pieces, so
//! that neither a round nor memory grows with a prefix.
//!
//! A file is never trusted: what is torn, edited, of another build or not ours is refused, counted and left out, and the
//! prompt is computed instead. Nothing here can change a reply or end a server.

pub mod files;
pub mod format;
pub mod shelf;
pub mod worker;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use sha2::{Digest, Sha256};

pub use files::{Files, Folder};
pub use format::{FileId, Header};
pub use shelf::Shelf;
pub use worker::{Disk, News, Order, Worker};

/// Bytes of a piece, as far as a page isn't larger.
pub const PIECE_BYTES: u64 = 1 << 20;
/// Orders that may wait for a worker; with them at most so many pieces.
pub const ORDERS_MAX: usize = 8;
/// Files that are read at once.
pub const LOADS_MAX: usize = 4;
/// Pieces of a load that are asked for ahead.
pub const LOAD_AHEAD: u32 = 4;
/// A file that builds on others builds on at most so many.
pub const CHAIN_MAX: u32 = 32;

/// How much the tier may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskLimits {
    /// Bytes of all files.
    pub bytes: u64,
    /// Nothing is written that would leave less than this free on the disk.
    pub min_free_bytes: u64,
    /// Memory for what is known of the files: their tokens, above all.
    pub index_bytes: u64,
}

/// What must be equal for a file to be read: weights, numerics, build, backend and the layout of records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskIdentity(pub [u8; 32]);

impl DiskIdentity {
    /// The digest of all parts, each with its length.
    pub fn of(parts: &[&str]) -> Self {
        let mut digest = Sha256::new();
        for part in parts {
            digest.update((part.len() as u64).to_le_bytes());
            digest.update(part);
        }
        DiskIdentity(digest.finalize().into())
    }
}

/// Why a file was not used. Each is counted by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It has our name and is not ours; it stays where it is.
    Foreign,
    /// Another format, build, backend or checkpoint wrote it; it goes when room is wanted.
    Stale,
    /// Cut short, edited, or half written; it is removed.
    Damaged,
    /// A file that it builds on is not there; it is removed.
    Orphan,
    /// The system couldn't read it.
    Unreadable,
}

impl Refusal {
    /// All reasons, in the order in which they are counted.
    pub const ALL: [Refusal; 5] =
        [Refusal::Foreign, Refusal::Stale, Refusal::Damaged, Refusal::Orphan, Refusal::Unreadable];

    /// The reason as metrics and logs say it.
    pub fn name(self) -> &'static str {
        match self {
            Refusal::Foreign => "foreign",
            Refusal::Stale => "stale",
            Refusal::Damaged => "damaged",
            Refusal::Orphan => "orphan",
            Refusal::Unreadable => "unreadable",
        }
    }

    pub(crate) fn index(self) -> usize {
        Refusal::ALL.iter().position(|other| *other == self).unwrap_or(0)
    }
}

/// Something that whoever runs the server may want to read: which file, and what is the matter.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DiskEvent {
    #[error("{file} is not used ({}): {why}", reason.name())]
    Refused { file: String, reason: Refusal, why: String },
    /// Said once until a write succeeds again.
    #[error("{file} couldn't be written: {why}. Kept prefixes stay in memory only until it can")]
    NotWritten { file: String, why: String },
}

/// Where events go.
pub type Report = Arc<dyn Fn(DiskEvent) + Send + Sync>;

/// Figures of the disk tier; all but the first four only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskStats {
    pub files: u64,
    pub bytes: u64,
    pub budget_bytes: u64,
    /// Memory that the list of the files takes.
    pub index_bytes: u64,
    /// Prompts that resumed from a file, and prefixes that were read for them.
    pub hits: u64,
    pub loads: u64,
    pub writes: u64,
    /// Files that the disk didn't take: full, below the free space floor, or broken.
    pub write_failures: u64,
    /// Files that were let go for others.
    pub evictions: u64,
    /// By [`Refusal`], in the order of [`Refusal::ALL`].
    pub refused: [u64; Refusal::ALL.len()],
}

/// Why a directory can't be used. Said at the start; later troubles only leave prefixes out.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    #[error("--cache-dir {}: {error}. Name a directory that this user may write, or leave the option out", dir.display())]
    Folder { dir: PathBuf, error: std::io::Error },
    #[error("--cache-dir {} is in use by another server. Give each server a directory of its own", dir.display())]
    InUse { dir: PathBuf },
}

/// Opens `dir` for this process alone, makes it where it isn't there, and reads what it holds.
///
/// # Errors
/// [`DiskError`] when it is no directory that can be written, or another server has it.
pub fn open(dir: &Path, limits: DiskLimits, identity: DiskIdentity, report: Report) -> Result<Disk<Folder>, DiskError> {
    let folder = Folder::open(dir)?;
    Disk::new(folder, limits, identity, report).map_err(|error| DiskError::Folder { dir: dir.to_path_buf(), error })
}
