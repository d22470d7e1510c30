//! What can be wrong with the files of a checkpoint. Each text says which file, what was found, what was expected, and
//! what to do next.

/// A file that can't be used as it is.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("{path}: {reason}. A checkpoint is a folder with config.json and safetensors files")]
    NotAFolder { path: String, reason: String },
    #[error("{file} has changed since it was opened: {how}")]
    Changed { file: String, how: String },
    #[error("{file} can't be read: {reason}")]
    Io { file: String, reason: String },
    #[error("{file} is missing from {folder}. Fetch the checkpoint again, or point to its folder")]
    MissingFile { file: String, folder: String },
    #[error(
        "{folder} has neither model.safetensors.index.json nor model.safetensors{found}. Only the release's own \
         safetensors files are read"
    )]
    NoWeights { folder: String, found: String },
    #[error("{file} is {found}, a format that is not read. Use the release's own safetensors files")]
    UnreadFormat { file: String, found: String },
    #[error("{file} is not valid JSON: {reason}. The file is damaged or cut off; fetch it again")]
    NotJson { file: String, reason: String },
    #[error("{file}: {reason}")]
    InvalidJson { file: String, reason: String },
    #[error("{file}: weight_map sends {tensor} to {shard:?}, expected a plain file name ending in .safetensors")]
    ShardName { file: String, tensor: String, shard: String },
    #[error(
        "{missing} of {count} shards are missing from {folder}: {names}. The download is incomplete; fetch it again"
    )]
    MissingShards { folder: String, missing: usize, count: usize, names: String },
    #[error("{file} ends at byte {found}, its header needs {needed}: the download is incomplete. Fetch it again")]
    Truncated { file: String, found: u64, needed: u64 },
    #[error("{file} claims a header of {found} bytes, expected at most {limit}: the file is damaged. Fetch it again")]
    HeaderLength { file: String, found: u64, limit: u64 },
    #[error("{file}: the header is damaged: {reason}. Fetch it again")]
    Header { file: String, reason: String },
    #[error("{file}: {tensor} has the dtype {found:?}, expected one of F8_E4M3, F8_E8M0, I8, BF16, F32")]
    Dtype { file: String, tensor: String, found: String },
    #[error("{file}: {tensor} has the shape {found}, expected at most {rank_max} dimensions and under 2^63 bytes")]
    ShapeSize { file: String, tensor: String, found: String, rank_max: usize },
    #[error("{file}: {tensor} takes bytes {start}..{end}, expected {needed} bytes for its dtype and shape")]
    ByteCount { file: String, tensor: String, start: u64, end: u64, needed: u64 },
    #[error(
        "{file}: {tensor} begins at byte {found} of the data, expected {expected}: tensors overlap or leave a hole. \
         Fetch it again"
    )]
    Layout { file: String, tensor: String, found: u64, expected: u64 },
    #[error("{file}: {found} bytes follow the last tensor, expected none. Fetch it again")]
    TrailingBytes { file: String, found: u64 },
    #[error("{tensor} is in {first} and again in {second}, expected once. Remove one of the two")]
    Repeated { tensor: String, first: String, second: String },
    #[error(
        "{index} sends {tensor} to {shard}, which doesn't have it{elsewhere}. Fetch the index and that shard again"
    )]
    NotInShard { index: String, tensor: String, shard: String, elsewhere: String },
    #[error("{shard} has {tensor}, which {index} doesn't list. Fetch the index and that shard again")]
    NotInIndex { index: String, tensor: String, shard: String },
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
    Several(Vec<CheckpointError>),
}

impl CheckpointError {
    /// The reasons one by one, for lists.
    pub fn reasons(&self) -> Vec<String> {
        match self {
            CheckpointError::Several(errors) => errors.iter().flat_map(CheckpointError::reasons).collect(),
            other => vec![other.to_string()],
        }
    }
}
