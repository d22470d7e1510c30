//! Judges one safetensors header. Every length in it is a claim: nothing is allocated or read on its word alone.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};

use crate::error::CheckpointError;
use crate::json::reason;
use crate::view::Dtype;

/// The format's own limit.
const HEADER_BYTES_MAX: u64 = 100_000_000;
const RANK_MAX: usize = 8;
const NAME_BYTES_MAX: usize = 512;
/// In one file; the whole release has a hundred thousand.
const TENSORS_MAX: usize = 1 << 18;

/// One tensor of a file: where it lies, counted from the file's start.
#[derive(Debug)]
pub(crate) struct Entry {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub start: usize,
    pub end: usize,
}

/// Reads the header of `bytes`, a whole file. Returns the tensors in file order and the header's length.
pub(crate) fn read(file: &str, bytes: &[u8]) -> Result<(Vec<Entry>, usize), CheckpointError> {
    let file_bytes = bytes.len() as u64;
    if let Some(found) = other_format(bytes) {
        return Err(CheckpointError::UnreadFormat { file: file.to_owned(), found: found.to_owned() });
    }
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(CheckpointError::Truncated { file: file.to_owned(), found: file_bytes, needed: 8 });
    };
    let header_bytes = u64::from_le_bytes(*length);
    if header_bytes > HEADER_BYTES_MAX {
        let limit = HEADER_BYTES_MAX;
        return Err(CheckpointError::HeaderLength { file: file.to_owned(), found: header_bytes, limit });
    }
    let Some((header, data)) = rest.split_at_checked(header_bytes as usize) else {
        let needed = 8 + header_bytes;
        return Err(CheckpointError::Truncated { file: file.to_owned(), found: file_bytes, needed });
    };
    if header.first() != Some(&b'{') {
        let reason = "it doesn't begin with {".to_owned();
        return Err(CheckpointError::Header { file: file.to_owned(), reason });
    }
    let mut raw = parse(header).map_err(|reason| CheckpointError::Header { file: file.to_owned(), reason })?;
    raw.sort_by(|left, right| (left.start, left.end, &left.name).cmp(&(right.start, right.end, &right.name)));

    let data_start = 8 + header.len();
    let mut entries = Vec::with_capacity(raw.len());
    let mut expected = 0;
    for tensor in raw {
        let entry = judge(file, &tensor, expected, data_start)?;
        expected = tensor.end;
        entries.push(entry);
    }
    let needed = data_start as u64 + expected;
    if needed > file_bytes {
        return Err(CheckpointError::Truncated { file: file.to_owned(), found: file_bytes, needed });
    }
    if data.len() as u64 > expected {
        let found = data.len() as u64 - expected;
        return Err(CheckpointError::TrailingBytes { file: file.to_owned(), found });
    }
    Ok((entries, header.len()))
}

/// Checks one tensor by itself and against the end of the one before it.
fn judge(file: &str, tensor: &Raw, expected: u64, data_start: usize) -> Result<Entry, CheckpointError> {
    let named = || (file.to_owned(), tensor.name.clone());
    let Some(dtype) = Dtype::parse(&tensor.dtype) else {
        let (file, tensor_name) = named();
        return Err(CheckpointError::Dtype { file, tensor: tensor_name, found: tensor.dtype.clone() });
    };
    let product = tensor
        .shape
        .iter()
        .try_fold(dtype.bytes() as u64, |bytes, dimension| bytes.checked_mul(*dimension))
        // Every dimension must fit as well: a product can be 0 beside an absurd one.
        .filter(|bytes| *bytes <= i64::MAX as u64 && tensor.shape.iter().all(|length| *length <= i64::MAX as u64));
    let Some(needed) = product.filter(|_| tensor.shape.len() <= RANK_MAX) else {
        let (file, tensor_name) = named();
        let found = show_shape(&tensor.shape);
        return Err(CheckpointError::ShapeSize { file, tensor: tensor_name, found, rank_max: RANK_MAX });
    };
    if tensor.start.checked_add(needed) != Some(tensor.end) {
        let (file, tensor_name) = named();
        let (start, end) = (tensor.start, tensor.end);
        return Err(CheckpointError::ByteCount { file, tensor: tensor_name, start, end, needed });
    }
    if tensor.start != expected {
        let (file, tensor_name) = named();
        return Err(CheckpointError::Layout { file, tensor: tensor_name, found: tensor.start, expected });
    }
    // The end may lie past the file; `read` compares the last one with the file's length before anything is sliced.
    let place = |offset: u64| usize::try_from(offset).ok().and_then(|offset| offset.checked_add(data_start));
    match (place(tensor.start), place(tensor.end)) {
        (Some(start), Some(end)) => {
            let shape = tensor.shape.iter().map(|length| *length as usize).collect();
            Ok(Entry { name: tensor.name.clone(), dtype, shape, start, end })
        }
        _ => {
            let (file, tensor_name) = named();
            let (start, end) = (tensor.start, tensor.end);
            Err(CheckpointError::ByteCount { file, tensor: tensor_name, start, end, needed })
        }
    }
}

fn show_shape(shape: &[u64]) -> String {
    match shape.len() > RANK_MAX {
        true => format!("{:?} and {} more", &shape[..RANK_MAX], shape.len() - RANK_MAX),
        false => format!("{shape:?}"),
    }
}

/// What a file is when it plainly isn't safetensors.
pub(crate) fn other_format(bytes: &[u8]) -> Option<&'static str> {
    const MAGICS: [(&[u8], &str); 7] = [
        (b"GGUF", "a GGUF file"),
        (b"FUGG", "a big-endian GGUF file"),
        (b"ggjt", "a GGML file"),
        (b"PK\x03\x04", "a zip archive (a torch checkpoint?)"),
        (b"\x93NUMPY", "a NumPy array"),
        (b"\x89HDF", "an HDF5 file"),
        (b"version https://git-lfs", "a Git LFS pointer, not the file itself"),
    ];
    MAGICS.iter().find(|(magic, _)| bytes.starts_with(magic)).map(|(_, name)| *name)
}

struct Raw {
    name: String,
    dtype: String,
    shape: Vec<u64>,
    start: u64,
    end: u64,
}

fn parse(header: &[u8]) -> Result<Vec<Raw>, String> {
    let mut reader = serde_json::Deserializer::from_slice(header);
    let tensors = Tensors.deserialize(&mut reader).map_err(|error| reason(&error))?;
    // The format pads with spaces, which the JSON reader skips.
    reader.end().map_err(|error| reason(&error))?;
    Ok(tensors)
}

/// The header's object: tensors, and one optional `__metadata__`. A name may appear once.
struct Tensors;

impl<'de> DeserializeSeed<'de> for Tensors {
    type Value = Vec<Raw>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Vec<Raw>, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Tensors {
    type Value = Vec<Raw>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Vec<Raw>, A::Error> {
        let mut names = std::collections::HashSet::new();
        let mut tensors = Vec::new();
        while let Some(name) = entries.next_key::<String>()? {
            if name.len() > NAME_BYTES_MAX {
                return Err(de::Error::custom(format_args!(
                    "a name has {} bytes, at most {NAME_BYTES_MAX}",
                    name.len()
                )));
            }
            if !names.insert(name.clone()) {
                return Err(de::Error::custom(format_args!("{name:?} appears twice")));
            }
            if name == "__metadata__" {
                entries.next_value::<IgnoredAny>()?;
                continue;
            }
            // The value's own error has the position but not the name.
            let info = match entries.next_value::<Info<'de>>() {
                Ok(info) => info,
                Err(error) => return Err(de::Error::custom(format_args!("{name:?}: {error}"))),
            };
            if tensors.len() == TENSORS_MAX {
                return Err(de::Error::custom(format_args!("it lists more than {TENSORS_MAX} tensors")));
            }
            let [start, end] = info.data_offsets;
            tensors.push(Raw { name, dtype: info.dtype.into_owned(), shape: info.shape.0, start, end });
        }
        Ok(tensors)
    }
}

/// A derived reader refuses a repeated field by itself.
#[derive(Deserialize)]
struct Info<'a> {
    #[serde(borrow)]
    dtype: Cow<'a, str>,
    shape: Dimensions,
    data_offsets: [u64; 2],
}

/// A shape with a bound on its length, so that a header full of numbers stays small.
struct Dimensions(Vec<u64>);

impl<'de> Deserialize<'de> for Dimensions {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bounded;
        impl<'de> Visitor<'de> for Bounded {
            type Value = Vec<u64>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a list of dimensions")
            }

            fn visit_seq<A: de::SeqAccess<'de>>(self, mut items: A) -> Result<Vec<u64>, A::Error> {
                let mut shape = Vec::new();
                while let Some(length) = items.next_element::<u64>()? {
                    if shape.len() == RANK_MAX {
                        return Err(de::Error::custom(format_args!("a shape has more than {RANK_MAX} dimensions")));
                    }
                    shape.push(length);
                }
                Ok(shape)
            }
        }
        deserializer.deserialize_seq(Bounded).map(Dimensions)
    }
}
