//! What packing weights may find wrong. Packing turns checkpoint bytes into a family's own layout, once, at load.

use tf_device::LaunchError;

/// A tensor cannot be packed. The caller adds the tensor's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PackError {
    /// The bytes are not those of a tensor of this shape.
    #[error("{what} has {found} bytes, and [{rows}, {columns}] needs {expected}")]
    Length { what: &'static str, found: usize, expected: usize, rows: usize, columns: usize },
    /// A dimension is zero, or has no whole number of blocks where the format needs one.
    #[error("{what} is {found}, which must be a positive multiple of {multiple}")]
    Multiple { what: &'static str, found: usize, multiple: usize },
    /// A scale byte is 255, which means "not a number".
    #[error(
        "the scale of row block {row_block}, column block {column_block} is 255 (not a number): the file is damaged or was \
         quantised from a tensor with overflows; fetch it again"
    )]
    NanScale { row_block: usize, column_block: usize },
    /// A scale is so large or small that code times scale is no bf16 number.
    #[error(
        "the scale of row block {row_block}, column block {column_block} is code {code}, this device's kernels take {least} to \
         {most}: use the CPU for this checkpoint"
    )]
    ScaleRange { row_block: usize, column_block: usize, code: u8, least: u8, most: u8 },
    /// A weight code means "not a number".
    #[error(
        "the weight at row {row}, column {column} is code {code:#04x} (not a number): the file is damaged or was \
         quantised from a tensor with overflows; fetch it again"
    )]
    NanWeight { row: usize, column: usize, code: u8 },
    /// The device has no room, or the tensor is beyond the family's limits.
    #[error(transparent)]
    Refused(#[from] LaunchError),
}

/// Checks a tensor's byte count against its shape.
pub(crate) fn check_length(
    what: &'static str,
    bytes: &[u8],
    expected: usize,
    rows: usize,
    columns: usize,
) -> Result<(), PackError> {
    let found = bytes.len();
    if found == expected { Ok(()) } else { Err(PackError::Length { what, found, expected, rows, columns }) }
}

/// Checks that a dimension is positive and a multiple of `multiple`.
pub(crate) fn check_multiple(what: &'static str, found: usize, multiple: usize) -> Result<(), PackError> {
    if found > 0 && found.is_multiple_of(multiple) {
        Ok(())
    } else {
        Err(PackError::Multiple { what, found, multiple })
    }
}

/// Finds the first scale code that is not a number in `[row_blocks, column_blocks]`.
pub(crate) fn check_scales(scale: &[u8], column_blocks: usize) -> Result<(), PackError> {
    match scale.iter().position(|code| *code == u8::MAX) {
        None => Ok(()),
        Some(at) => Err(PackError::NanScale { row_block: at / column_blocks, column_block: at % column_blocks }),
    }
}

/// Finds the first scale code outside `codes` in `[row_blocks, column_blocks]`.
pub(crate) fn check_scale_range(
    scale: &[u8],
    column_blocks: usize,
    codes: std::ops::RangeInclusive<u8>,
) -> Result<(), PackError> {
    match scale.iter().position(|code| !codes.contains(code)) {
        None => Ok(()),
        Some(at) => Err(PackError::ScaleRange {
            row_block: at / column_blocks,
            column_block: at % column_blocks,
            code: scale[at],
            least: *codes.start(),
            most: *codes.end(),
        }),
    }
}
