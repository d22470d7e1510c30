//! Where the rows of the n-gram tables lie, and how a round gets those it asks for: mapped with the checkpoint, copied into
//! memory, or read from the file row by row with a cache of the rows met before.
//!
//! The same stored bytes are decoded by the same kernel wherever they were, so no bit depends on the place (decision 0009).

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use tf_checkpoint::{Checkpoint, CheckpointError};
use tf_device::LaunchError;
use tf_device::gpu::Backend;
use tf_kernels::engram::EngramError;

use super::forward::StepError;
use super::shape::Shape;

/// Threads that read rows at once, at most: a drive answers many reads in the time of one.
const READERS_MAX: usize = 16;
/// Rows that are worth a further thread.
const ROWS_A_READER: usize = 4;

/// Where n-gram rows live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngramPlace {
    /// In the mapped file: the system keeps the pages it has room for.
    #[default]
    Mapped,
    /// Copied into the host's memory at load.
    Ram,
    /// In the file, read row by row beside a cache of at most so many bytes.
    Disk { cache_bytes: u64 },
}

/// Why the rows can't live where they were asked to.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngramPlaceError {
    #[error("this checkpoint is part of the program and has no file to read n-gram rows from: leave --engram disk out")]
    NoFile,
    #[error("{path} can't be opened for its n-gram rows: {reason}. Check the file and its permissions")]
    Open { path: String, reason: String },
    #[error("{bytes} bytes of n-gram rows don't fit into memory: use --engram mmap or --engram disk")]
    Memory { bytes: u64 },
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "row {row} of the n-gram table can't be read from {path} at byte {offset}: {reason}. Check the drive and the file"
)]
/// Why a round did not get its rows.
pub struct RowError {
    pub path: String,
    pub row: u32,
    pub offset: u64,
    pub reason: String,
}

/// One n-gram table, or the rows of one that a round asked for.
#[derive(Clone, Copy, Debug)]
pub struct EngramTable<'a> {
    /// `[rows, engram_head_dim]` E4M3.
    pub codes: &'a [u8],
    /// `[rows, engram_head_dim / 32]` E8M0.
    pub scales: &'a [u8],
}

/// Weight and scale of each table.
pub(super) fn names(shape: &Shape) -> Vec<[String; 2]> {
    let table = |layer: &usize| ["weight", "scale"].map(|part| format!("layers.{layer}.engram.embed.{part}"));
    shape.engram_layer_ids.iter().map(table).collect()
}

/// Asks the system whether the files that a loaded model reads are what they were when they were opened: those of the n-gram
/// rows unless they were copied, and all of them where weights stay mapped.
///
/// # Errors
/// [`CheckpointError::Changed`].
pub fn check_files(
    checkpoint: &Checkpoint,
    shape: &Shape,
    place: EngramPlace,
    backend: Option<Backend>,
) -> Result<(), CheckpointError> {
    match (backend, place) {
        (Some(Backend::Metal), _) => checkpoint.check_all_unchanged(),
        (None | Some(Backend::Cuda), EngramPlace::Ram) => Ok(()),
        (None | Some(Backend::Cuda), EngramPlace::Mapped | EngramPlace::Disk { .. }) => {
            checkpoint.check_unchanged(names(shape).iter().flatten().map(String::as_str))
        }
    }
}

/// The n-gram tables.
#[derive(Debug)]
pub(super) enum EngramTables {
    /// The names of weight and scale in a mapped checkpoint.
    Mapped { checkpoint: Arc<Checkpoint>, names: Vec<[String; 2]> },
    /// Codes and scales of each table.
    Owned(Vec<[Vec<u8>; 2]>),
    /// In the files of a checkpoint.
    Disk(DiskTables),
}

/// What a round's gather reads.
pub(super) enum Gathered<'a> {
    /// The ids of the round count in the table.
    Whole(EngramTable<'a>),
    /// Row `i` is that of the round's id `i`.
    Picked { codes: Vec<u8>, scales: Vec<u8>, in_order: Vec<u32> },
}

impl EngramTables {
    /// Those of a mapped checkpoint, where `place` says. `names`: weight and scale of each table; `head_dim`: columns of a row.
    ///
    /// # Errors
    /// [`EngramPlaceError`].
    pub fn placed(self, place: EngramPlace, head_dim: usize) -> Result<EngramTables, EngramPlaceError> {
        let EngramTables::Mapped { checkpoint, names } = self else { return Ok(self) };
        match place {
            EngramPlace::Mapped => Ok(EngramTables::Mapped { checkpoint, names }),
            EngramPlace::Ram => {
                let mut tables = Vec::new();
                for table in &names {
                    let [codes, scales] = table.each_ref().map(|name| copied(mapped(&checkpoint, name)));
                    tables.push([codes?, scales?]);
                }
                Ok(EngramTables::Owned(tables))
            }
            EngramPlace::Disk { cache_bytes } => {
                DiskTables::open(&checkpoint, &names, head_dim, cache_bytes).map(EngramTables::Disk)
            }
        }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        match self {
            EngramTables::Mapped { names, .. } => names.len(),
            EngramTables::Owned(tables) => tables.len(),
            EngramTables::Disk(disk) => disk.tables.len(),
        }
    }

    /// Bytes of a table, wherever they lie.
    pub fn table_bytes(&self, index: usize) -> u64 {
        match self {
            EngramTables::Disk(disk) => disk.tables[index].bytes(),
            EngramTables::Mapped { .. } | EngramTables::Owned(_) => {
                self.table(index).map_or(0, |table| (table.codes.len() + table.scales.len()) as u64)
            }
        }
    }

    /// A whole table. `None` where it is read row by row.
    pub fn table(&self, index: usize) -> Option<EngramTable<'_>> {
        match self {
            EngramTables::Mapped { checkpoint, names } => {
                let [codes, scales] = &names[index];
                Some(EngramTable { codes: mapped(checkpoint, codes), scales: mapped(checkpoint, scales) })
            }
            EngramTables::Owned(tables) => {
                let [codes, scales] = &tables[index];
                Some(EngramTable { codes, scales })
            }
            EngramTables::Disk(_) => None,
        }
    }

    /// What the rows `ids` of a table are gathered from.
    ///
    /// # Errors
    /// [`EngramError::Launch`] for an id outside the table, [`RowError`] for a row that can't be read,
    /// [`StepError::EngramFile`] for a mapped file that isn't what it was.
    pub fn rows(&self, index: usize, ids: &[u32]) -> Result<Gathered<'_>, StepError> {
        if let EngramTables::Mapped { checkpoint, names } = self {
            // A page behind the end of a file that has shrunk ends the program when it is touched.
            let names = names[index].iter().map(String::as_str);
            checkpoint.check_unchanged(names).map_err(|error| StepError::EngramFile(error.to_string()))?;
        }
        match (self.table(index), self) {
            (Some(table), _) => Ok(Gathered::Whole(table)),
            (None, EngramTables::Disk(disk)) => disk.gather(index, ids),
            (None, _) => unreachable!("only tables on disk are not whole"),
        }
    }
}

impl Gathered<'_> {
    /// Codes, scales, and the ids that count in them; `ids` are the round's.
    pub fn table<'a>(&'a self, ids: &'a [u32]) -> (EngramTable<'a>, &'a [u32]) {
        match self {
            Gathered::Whole(table) => (*table, ids),
            Gathered::Picked { codes, scales, in_order } => (EngramTable { codes, scales }, in_order),
        }
    }

    /// An error of the gather, with the row's number in the whole table.
    pub fn named(&self, error: EngramError, ids: &[u32]) -> EngramError {
        match (self, error) {
            (Gathered::Picked { .. }, EngramError::NotANumber { what, row, byte }) => {
                EngramError::NotANumber { what, row: ids.get(row as usize).copied().unwrap_or(row), byte }
            }
            (_, error) => error,
        }
    }
}

fn mapped<'a>(checkpoint: &'a Checkpoint, name: &str) -> &'a [u8] {
    checkpoint.view(name).expect("bound when the weights were loaded").bytes
}

fn copied(bytes: &[u8]) -> Result<Vec<u8>, EngramPlaceError> {
    let mut copy = Vec::new();
    copy.try_reserve_exact(bytes.len()).map_err(|_| EngramPlaceError::Memory { bytes: bytes.len() as u64 })?;
    copy.extend_from_slice(bytes);
    Ok(copy)
}

/// The tables in their files.
#[derive(Debug)]
pub(super) struct DiskTables {
    tables: Vec<DiskTable>,
    cache: Mutex<RowCache>,
}

#[derive(Debug)]
struct DiskTable {
    rows: u32,
    codes: Part,
    scales: Part,
}

/// Codes or scales of a table.
#[derive(Debug)]
struct Part {
    file: File,
    path: PathBuf,
    start: u64,
    row_bytes: usize,
}

impl DiskTables {
    fn open(
        checkpoint: &Checkpoint,
        names: &[[String; 2]],
        head_dim: usize,
        cache_bytes: u64,
    ) -> Result<DiskTables, EngramPlaceError> {
        let part = |name: &String, row_bytes: usize| {
            let place = checkpoint.place(name).ok_or(EngramPlaceError::NoFile)?;
            let file = File::open(&place.path).map_err(|error| EngramPlaceError::Open {
                path: place.path.display().to_string(),
                reason: error.to_string(),
            })?;
            Ok((Part { file, path: place.path, start: place.start, row_bytes }, place.bytes))
        };
        let mut tables = Vec::new();
        for [codes, scales] in names {
            let (codes, bytes) = part(codes, head_dim)?;
            let (scales, _) = part(scales, head_dim / 32)?;
            // Table and ids are 32 bits wide: the shape's limit.
            tables.push(DiskTable { rows: (bytes / head_dim as u64) as u32, codes, scales });
        }
        let cache = Mutex::new(RowCache::new(cache_bytes, head_dim + head_dim / 32));
        Ok(DiskTables { tables, cache })
    }

    /// The rows of `ids`, from the cache and the files.
    fn gather(&self, index: usize, ids: &[u32]) -> Result<Gathered<'_>, StepError> {
        let table = &self.tables[index];
        let largest = ids.iter().max().copied().unwrap_or(0) as usize;
        LaunchError::check_limit("an n-gram row id", largest, (table.rows as usize).saturating_sub(1))
            .map_err(EngramError::Launch)?;
        let (code_bytes, scale_bytes) = (table.codes.row_bytes, table.scales.row_bytes);
        let (mut codes, mut scales) = (vec![0; ids.len() * code_bytes], vec![0; ids.len() * scale_bytes]);
        let mut put = |place: usize, row: &[u8]| {
            codes[place * code_bytes..][..code_bytes].copy_from_slice(&row[..code_bytes]);
            scales[place * scale_bytes..][..scale_bytes].copy_from_slice(&row[code_bytes..]);
        };
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let mut missing: Vec<(u32, usize)> = Vec::new();
        for (place, row) in ids.iter().enumerate() {
            match cache.find(index, *row) {
                Some(bytes) => put(place, bytes),
                None => missing.push((*row, place)),
            }
        }
        // In the order of the file, each row once.
        missing.sort_unstable();
        let mut wanted: Vec<u32> = missing.iter().map(|(row, _)| *row).collect();
        wanted.dedup();
        let read = table.read(&wanted)?;
        let row_of = |found: usize| &read[found * (code_bytes + scale_bytes)..][..code_bytes + scale_bytes];
        let mut found = 0;
        for (row, place) in missing {
            if wanted[found] != row {
                found += 1;
            }
            put(place, row_of(found));
        }
        for (found, row) in wanted.iter().enumerate() {
            cache.keep(index, *row, row_of(found));
        }
        Ok(Gathered::Picked { codes, scales, in_order: (0..ids.len() as u32).collect() })
    }
}

impl DiskTable {
    fn bytes(&self) -> u64 {
        u64::from(self.rows) * (self.codes.row_bytes + self.scales.row_bytes) as u64
    }

    /// Codes and scales of each row, one behind the other.
    fn read(&self, rows: &[u32]) -> Result<Vec<u8>, RowError> {
        let row_bytes = self.codes.row_bytes + self.scales.row_bytes;
        let mut bytes = vec![0; rows.len() * row_bytes];
        let readers = rows.len().div_ceil(ROWS_A_READER).clamp(1, READERS_MAX);
        let share = rows.len().div_ceil(readers).max(1);
        let part = |rows: &[u32], bytes: &mut [u8]| {
            rows.iter().zip(bytes.chunks_mut(row_bytes)).try_for_each(|(row, bytes)| self.read_row(*row, bytes))
        };
        if readers == 1 {
            part(rows, &mut bytes)?;
            return Ok(bytes);
        }
        std::thread::scope(|scope| {
            let parts = rows.chunks(share).zip(bytes.chunks_mut(share * row_bytes));
            let running: Vec<_> = parts.map(|(rows, bytes)| scope.spawn(move || part(rows, bytes))).collect();
            running.into_iter().try_for_each(|part| part.join().expect("reading a row does not panic"))
        })?;
        Ok(bytes)
    }

    fn read_row(&self, row: u32, bytes: &mut [u8]) -> Result<(), RowError> {
        let (codes, scales) = bytes.split_at_mut(self.codes.row_bytes);
        self.codes.read_row(row, codes)?;
        self.scales.read_row(row, scales)
    }
}

impl Part {
    fn read_row(&self, row: u32, bytes: &mut [u8]) -> Result<(), RowError> {
        let offset = self.start + u64::from(row) * self.row_bytes as u64;
        self.file.read_exact_at(bytes, offset).map_err(|error| {
            let reason = match error.kind() {
                std::io::ErrorKind::UnexpectedEof => "the file ends before it".to_owned(),
                _ => error.to_string(),
            };
            let path = self.path.display().to_string();
            RowError { path, row, offset, reason }
        })
    }
}

/// Rows met before, each in the one slot that its number gives: a row takes the place of another without asking.
#[derive(Debug)]
struct RowCache {
    row_bytes: usize,
    /// Table and row of each slot.
    keys: Vec<Option<(u32, u32)>>,
    rows: Vec<u8>,
}

impl RowCache {
    /// As many slots as `bytes` hold, which may be none.
    fn new(bytes: u64, row_bytes: usize) -> RowCache {
        let slots = bytes / (row_bytes + size_of::<Option<(u32, u32)>>()) as u64;
        let slots = usize::try_from(slots).unwrap_or(0);
        RowCache { row_bytes, keys: vec![None; slots], rows: vec![0; slots * row_bytes] }
    }

    /// The slot of a row; neighbouring rows get distant ones.
    fn slot(&self, table: usize, row: u32) -> Option<usize> {
        let mixed = (u64::from(row) << 8 | table as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> 32).checked_rem(self.keys.len() as u64).map(|slot| slot as usize)
    }

    fn find(&self, table: usize, row: u32) -> Option<&[u8]> {
        let slot = self.slot(table, row)?;
        (self.keys[slot] == Some((table as u32, row))).then(|| &self.rows[slot * self.row_bytes..][..self.row_bytes])
    }

    fn keep(&mut self, table: usize, row: u32, bytes: &[u8]) {
        if let Some(slot) = self.slot(table, row) {
            self.keys[slot] = Some((table as u32, row));
            self.rows[slot * self.row_bytes..][..self.row_bytes].copy_from_slice(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/dsv41-tiny-a/model");
    const HEAD_DIM: usize = 32;

    /// The tables of a folder in one place.
    fn tables(folder: &Path, place: EngramPlace) -> Result<EngramTables, EngramPlaceError> {
        let checkpoint = Arc::new(Checkpoint::open(folder).unwrap());
        let names = [1, 4].map(|layer| ["weight", "scale"].map(|part| format!("layers.{layer}.engram.embed.{part}")));
        EngramTables::Mapped { checkpoint, names: names.to_vec() }.placed(place, HEAD_DIM)
    }

    /// The rows of `ids` as a gather gets them.
    fn rows(tables: &EngramTables, index: usize, ids: &[u32]) -> Vec<(Vec<u8>, Vec<u8>)> {
        let gathered = tables.rows(index, ids).unwrap();
        let (table, ids) = gathered.table(ids);
        let row = |bytes: &[u8], row: u32, width: usize| bytes[row as usize * width..][..width].to_vec();
        ids.iter().map(|id| (row(table.codes, *id, HEAD_DIM), row(table.scales, *id, HEAD_DIM / 32))).collect()
    }

    fn row_count(tables: &EngramTables, index: usize) -> u32 {
        (tables.table_bytes(index) / (HEAD_DIM + HEAD_DIM / 32) as u64) as u32
    }

    #[test]
    fn a_row_has_the_same_bytes_wherever_it_lies() {
        let mapped = tables(Path::new(GOLDEN), EngramPlace::Mapped).unwrap();
        let mut compared = 0;
        // No cache, one that holds a few rows, and one for all.
        for place in [EngramPlace::Ram, disk(0), disk(400), disk(1 << 20)] {
            let other = tables(Path::new(GOLDEN), place).unwrap();
            assert_eq!(other.count(), mapped.count());
            for index in 0..mapped.count() {
                let count = row_count(&mapped, index);
                assert_eq!(row_count(&other, index), count);
                let every: Vec<u32> = (0..count).rev().collect();
                let few = [count - 1, 0, 7, 7, 0, count / 2];
                for ids in [&few[..], &every, &few, &[3]] {
                    assert_eq!(rows(&other, index, ids), rows(&mapped, index, ids), "{place:?}, table {index}");
                    compared += ids.len();
                }
            }
        }
        assert!(compared > 1000, "{compared} rows");
    }

    fn disk(cache_bytes: u64) -> EngramPlace {
        EngramPlace::Disk { cache_bytes }
    }

    /// A copy of the golden checkpoint.
    fn copy_of_golden(name: &str) -> PathBuf {
        let target = std::env::temp_dir().join(format!("tensorfold-engram-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&target).unwrap();
        for entry in std::fs::read_dir(GOLDEN).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                std::fs::copy(&path, target.join(path.file_name().unwrap())).unwrap();
            }
        }
        target
    }

    #[test]
    fn what_is_cached_is_not_read_again_and_a_lost_file_is_named() {
        let folder = copy_of_golden("lost");
        let tables = tables(&folder, disk(1 << 20)).unwrap();
        let before = rows(&tables, 0, &[1, 2, 3]);
        // The file ends before its rows, as on a drive that fails.
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "safetensors") {
                File::options().write(true).open(path).unwrap().set_len(16).unwrap();
            }
        }
        assert_eq!(rows(&tables, 0, &[3, 1, 2]), [2, 0, 1].map(|row: usize| before[row].clone()), "from the cache");
        let error = tables.rows(0, &[1, 9]).map(|_| ()).unwrap_err().to_string();
        assert!(
            error.contains("row 9 of the n-gram table can't be read from") && error.contains("safetensors"),
            "{error}"
        );
        std::fs::remove_dir_all(&folder).unwrap();
    }

    /// Reported as: the server is gone with SIGBUS.
    #[test]
    fn a_checkpoint_that_shrinks_under_its_map_is_refused_and_not_read() {
        let folder = copy_of_golden("shrinks");
        let tables = tables(&folder, EngramPlace::Mapped).unwrap();
        assert_eq!(rows(&tables, 0, &[1, 2]).len(), 2);
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "safetensors") {
                File::options().write(true).open(path).unwrap().set_len(16).unwrap();
            }
        }
        let error = tables.rows(0, &[1]).map(|_| ()).unwrap_err();
        assert!(matches!(&error, StepError::EngramFile(text) if text.contains("it has 16 bytes and had")), "{error}");
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn files_are_watched_as_long_as_something_is_read_from_them() {
        let folder = copy_of_golden("watched");
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let shape = Shape::from_config(&checkpoint.config().unwrap()).unwrap();
        let places = [(EngramPlace::Mapped, None), (disk(0), None), (EngramPlace::Ram, Some(Backend::Metal))];
        let check = |(place, backend)| check_files(&checkpoint, &shape, place, backend);
        assert!(places.into_iter().all(|place| check(place).is_ok()));
        for (name, _) in checkpoint.shards() {
            let file = File::options().append(true).open(folder.join(name)).unwrap();
            file.set_len(file.metadata().unwrap().len() + 1).unwrap();
        }
        assert!(places.into_iter().all(|place| check(place).is_err()));
        assert!(check((EngramPlace::Ram, None)).is_ok(), "all of it was copied");
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_row_outside_the_table_is_refused_before_anything_is_read() {
        let tables = tables(Path::new(GOLDEN), disk(1 << 20)).unwrap();
        let beyond = row_count(&tables, 1);
        assert!(tables.rows(1, &[beyond - 1]).is_ok());
        let error = tables.rows(1, &[0, beyond]).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("an n-gram row id"), "{error}");
    }

    #[test]
    fn a_damaged_row_is_named_by_its_number_in_the_table() {
        let picked = Gathered::Picked { codes: Vec::new(), scales: Vec::new(), in_order: vec![0, 1] };
        let damaged = |row| EngramError::NotANumber { what: "code", row, byte: 5 };
        assert_eq!(picked.named(damaged(1), &[40, 77]), damaged(77));
        let whole = Gathered::Whole(EngramTable { codes: &[], scales: &[] });
        assert_eq!(whole.named(damaged(1), &[40, 77]), damaged(1));
    }

    #[test]
    fn rows_of_a_checkpoint_inside_the_program_have_no_file() {
        let mapped = tables(Path::new(GOLDEN), EngramPlace::Mapped).unwrap();
        let EngramTables::Mapped { checkpoint, names } = mapped else { panic!("mapped") };
        assert!(checkpoint.place(&names[0][0]).is_some() && checkpoint.place("nothing").is_none());
        let files: tf_checkpoint::EmbeddedFiles = Vec::leak(
            std::fs::read_dir(GOLDEN)
                .unwrap()
                .map(|entry| entry.unwrap().path())
                .filter(|path| path.is_file())
                .map(|path| {
                    let name: &'static str = path.file_name().unwrap().to_str().unwrap().to_owned().leak();
                    let bytes: &'static [u8] = std::fs::read(&path).unwrap().leak();
                    (name, bytes)
                })
                .collect(),
        );
        let checkpoint = Arc::new(Checkpoint::embedded(files).unwrap());
        let inside = |place| {
            let tables = EngramTables::Mapped { checkpoint: checkpoint.clone(), names: names.clone() };
            tables.placed(place, HEAD_DIM)
        };
        assert_eq!(inside(disk(0)).map(|_| ()).unwrap_err(), EngramPlaceError::NoFile);
        assert_eq!(rows(&inside(EngramPlace::Ram).unwrap(), 0, &[5]).len(), 1);
    }
}
