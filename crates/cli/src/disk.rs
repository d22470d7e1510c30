//! The disk tier of kept prefixes: from options to an open folder.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tf_engine::disk::{self, Disk, DiskEvent, DiskIdentity, DiskLimits, Folder, Refusal};
use tf_model::deepseek_v41::cache::CacheLayout;

use crate::arguments::{Arguments, Mistakes};
use crate::build;
use crate::failure::Failure;
use crate::load::Checked;
use crate::resolve::flag_text;

/// Budget and free space where nobody says.
const BYTES: u64 = 32 << 30;
const MIN_FREE_BYTES: u64 = 4 << 30;

/// A byte of list for so many bytes of files: no less than four bytes a token need on disk.
const INDEX_SHARE: u64 = 256;
/// However little may be on disk, and however much.
const INDEX_BYTES: (u64, u64) = (2 << 20, 256 << 20);
/// Of the memory it takes this part at most.
const INDEX_PART: u64 = 8;

/// Memory for the list of what is on disk; none without a folder. What is asked for is checked by [`options`].
pub fn index_bytes(arguments: &Arguments, memory: Option<u64>) -> u64 {
    if folder(arguments).is_none() {
        return 0;
    }
    let bytes = arguments.bytes("cache-dir-bytes").unwrap_or(BYTES);
    (bytes / INDEX_SHARE).clamp(INDEX_BYTES.0, INDEX_BYTES.1).min(memory.unwrap_or(u64::MAX) / INDEX_PART)
}

fn folder(arguments: &Arguments) -> Option<PathBuf> {
    flag_text(arguments, "cache-dir").filter(|dir| *dir != "off").map(PathBuf::from)
}

/// What was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskOptions {
    pub dir: PathBuf,
    pub limits: DiskLimits,
}

/// The folder and its limits, if there is to be one.
///
/// # Errors
/// [`Mistakes`] for options that would have no effect.
pub fn options(
    arguments: &Arguments,
    prefix_cache_bytes: u64,
    index_bytes: u64,
) -> Result<Option<DiskOptions>, Mistakes> {
    let dir = folder(arguments);
    let mut mistakes = Vec::new();
    if dir.is_none() {
        for flag in ["cache-dir-bytes", "cache-dir-min-free"] {
            if arguments.is_given(flag) {
                mistakes.push(format!("--{flag} has no effect without --cache-dir. Name a folder, or leave it out"));
            }
        }
    }
    if let (Some(dir), 0) = (&dir, prefix_cache_bytes) {
        let dir = dir.display();
        mistakes.push(format!("--cache-dir {dir} has no effect while no prefix is kept: leave out --prefix-cache off"));
    }
    if !mistakes.is_empty() {
        return Err(Mistakes(mistakes));
    }
    let limits = DiskLimits {
        bytes: arguments.bytes("cache-dir-bytes").unwrap_or(BYTES),
        min_free_bytes: arguments.bytes("cache-dir-min-free").unwrap_or(MIN_FREE_BYTES),
        index_bytes,
    };
    Ok(dir.map(|dir| DiskOptions { dir, limits }))
}

/// Opens the folder for a model that is about to be loaded.
///
/// # Errors
/// When it can't be used, or another server has it.
pub fn open(arguments: &Arguments, checked: &Checked) -> Result<Option<Disk<Folder>>, Failure> {
    let loading = &checked.loading;
    let asked = options(arguments, loading.prefix_cache_bytes, loading.plan.disk_index_bytes)?;
    let Some(DiskOptions { dir, limits }) = asked else {
        return Ok(None);
    };
    let disk = disk::open(&dir, limits, identity(checked), report(&dir));
    let disk = disk.map_err(|error| Failure::run_time(error.to_string()))?;
    tell(&dir, &disk);
    Ok(Some(disk))
}

/// Whether [`open`] would do, leaving everything as it is.
///
/// # Errors
/// As [`open`].
pub fn check(arguments: &Arguments, checked: &Checked) -> Result<(), Failure> {
    let loading = &checked.loading;
    match options(arguments, loading.prefix_cache_bytes, loading.plan.disk_index_bytes)? {
        Some(DiskOptions { dir, .. }) => Folder::check(&dir).map_err(|error| Failure::run_time(error.to_string())),
        None => Ok(()),
    }
}

/// The fingerprint promises equal replies; equal sources and records promise equal states.
fn identity(checked: &Checked) -> DiskIdentity {
    let options = &checked.loading.options;
    let layout = CacheLayout::new(&checked.shape, options.slots, options.context, options.pages);
    DiskIdentity::of(&[&checked.fingerprint, build::SOURCES, &layout.identity(options.draft)])
}

fn tell(dir: &Path, disk: &Disk<Folder>) {
    tracing::info!(dir = %dir.display(), files = disk.file_count(), "kept prefixes on disk");
}

fn report(dir: &Path) -> disk::Report {
    let dir = dir.display().to_string();
    Arc::new(move |event: DiskEvent| match &event {
        // The usual thing after an update.
        DiskEvent::Refused { reason: Refusal::Stale, .. } => tracing::info!("--cache-dir {dir}: {event}"),
        DiskEvent::Refused { .. } | DiskEvent::NotWritten { .. } => tracing::warn!("--cache-dir {dir}: {event}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arguments::{Request, parse};
    use crate::options::Environment;

    fn options_of(line: &str, prefix_cache_bytes: u64) -> Result<Option<DiskOptions>, String> {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let Ok(Request::Run(arguments)) = parse(&words, &Environment::of(&[])) else { panic!("{line}") };
        let index_bytes = index_bytes(&arguments, Some(1 << 30));
        options(&arguments, prefix_cache_bytes, index_bytes).map_err(|mistakes| mistakes.to_string())
    }

    #[test]
    fn a_folder_has_limits_and_limits_need_a_folder() {
        assert_eq!(options_of("serve", 1), Ok(None));
        let limits = DiskLimits { bytes: 32 << 30, min_free_bytes: 4 << 30, index_bytes: 128 << 20 };
        assert_eq!(options_of("serve --cache-dir /x", 1), Ok(Some(DiskOptions { dir: "/x".into(), limits })));
        let line = "serve --cache-dir /x --cache-dir-bytes 3MiB --cache-dir-min-free 0";
        let limits = DiskLimits { bytes: 3 << 20, min_free_bytes: 0, index_bytes: 2 << 20 };
        assert_eq!(options_of(line, 1), Ok(Some(DiskOptions { dir: "/x".into(), limits })));
        let error = options_of("serve --cache-dir-bytes 3MiB --cache-dir-min-free 1", 1).unwrap_err();
        assert!(
            error.contains("--cache-dir-bytes has no effect") && error.contains("--cache-dir-min-free has"),
            "{error}"
        );
        let error = options_of("serve --cache-dir /x", 0).unwrap_err();
        assert!(error.contains("--cache-dir /x has no effect"), "{error}");
    }
}
