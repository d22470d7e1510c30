//! DeepSeek-V4.1-Flash: shape, weight table, caches, forward and draft head. All mathematics, no scheduling.

pub mod deepseek_v41;

use std::sync::Arc;

use tf_checkpoint::{Checkpoint, CheckpointError};
use tf_device::Device;

use deepseek_v41::engram::{EngramError, EngramHash};
use deepseek_v41::load::{self, LoadProgress, Weights};
use deepseek_v41::shape::{Shape, ShapeError};
use deepseek_v41::{BuildError, DeepseekV41, Options};

/// The model families of this build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    DeepseekV41,
}

impl Family {
    pub const ALL: [Family; 1] = [Family::DeepseekV41];

    /// `model_type` of the family's configurations.
    pub const fn model_type(self) -> &'static str {
        match self {
            Family::DeepseekV41 => "deepseek_v41",
        }
    }
}

/// Why a checkpoint gave no model.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Shape(#[from] ShapeError),
    #[error(transparent)]
    Weights(#[from] load::LoadError),
    #[error(transparent)]
    Engram(#[from] EngramError),
    #[error(transparent)]
    Build(#[from] BuildError),
}

/// Reads, checks and packs `checkpoint` for the CPU. `token_map[id]` is the folded n-gram id of token `id`, from its
/// tokenizer.
///
/// # Errors
/// [`LoadError`] for a configuration, tensor, token map or option that this build cannot serve.
pub fn load(
    checkpoint: Arc<Checkpoint>,
    token_map: Vec<u32>,
    options: Options,
    progress: &(dyn Fn(LoadProgress) + Sync),
) -> Result<DeepseekV41, LoadError> {
    load_on(&Device::cpu(), checkpoint, token_map, options, progress)
}

/// As [`load`], for any device.
///
/// # Errors
/// As [`load`], and where the device has no room.
pub fn load_on(
    device: &Device,
    checkpoint: Arc<Checkpoint>,
    token_map: Vec<u32>,
    options: Options,
    progress: &(dyn Fn(LoadProgress) + Sync),
) -> Result<DeepseekV41, LoadError> {
    let shape = Shape::from_config(&checkpoint.config()?)?;
    options.check(&shape).map_err(BuildError::from)?;
    let hash = EngramHash::new(&shape, token_map)?;
    let weights = Weights::load(checkpoint, &shape, device, options.threads, progress)?;
    Ok(DeepseekV41::new(shape, weights, hash, options)?)
}
