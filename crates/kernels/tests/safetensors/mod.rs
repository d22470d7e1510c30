//! Reads the golden files and the tensors of a checkpoint, for tests only and without any production code.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::path::Path;

/// A safetensors file held in memory.
pub struct File {
    name: String,
    header: serde_json::Value,
    data: Vec<u8>,
}

/// One tensor as it is stored.
pub struct Stored<'a> {
    pub name: String,
    pub dtype: &'a str,
    pub shape: Vec<usize>,
    pub bytes: &'a [u8],
}

impl File {
    pub fn open(path: &Path) -> File {
        let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let header_end = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
        let header = serde_json::from_slice(&bytes[8..header_end]).expect("the header is JSON");
        File { name: path.display().to_string(), header, data: bytes[header_end..].to_vec() }
    }

    /// The names of the tensors, in the order of the file's header.
    pub fn names(&self) -> Vec<&str> {
        let entries = self.header.as_object().expect("the header is an object");
        entries.keys().map(String::as_str).filter(|&name| name != "__metadata__").collect()
    }

    pub fn has(&self, name: &str) -> bool {
        self.header.get(name).is_some()
    }

    pub fn get(&self, name: &str) -> Stored<'_> {
        let entry = self.header.get(name).unwrap_or_else(|| panic!("{} holds no {name}", self.name));
        let numbers = |key: &str| -> Vec<usize> {
            let list = entry[key].as_array().expect("a list");
            list.iter().map(|value| value.as_u64().expect("a count") as usize).collect()
        };
        let offsets = numbers("data_offsets");
        Stored {
            name: name.to_string(),
            dtype: entry["dtype"].as_str().expect("a dtype"),
            shape: numbers("shape"),
            bytes: &self.data[offsets[0]..offsets[1]],
        }
    }

    /// The values of an F32 or BF16 tensor.
    pub fn floats(&self, name: &str) -> Vec<f64> {
        self.get(name).floats()
    }

    /// The values of an integer tensor.
    pub fn integers(&self, name: &str) -> Vec<i64> {
        self.get(name).integers()
    }
}

impl Stored<'_> {
    pub fn floats(&self) -> Vec<f64> {
        match self.dtype {
            "F32" => {
                let value = |b: &[u8]| f64::from(f32::from_le_bytes(b.try_into().expect("four bytes")));
                self.bytes.chunks(4).map(value).collect()
            }
            "BF16" => {
                let value = |b: &[u8]| f64::from(f32::from_bits(u32::from(b[0]) << 16 | u32::from(b[1]) << 24));
                self.bytes.chunks(2).map(value).collect()
            }
            other => panic!("{} is {other}, not a float tensor", self.name),
        }
    }

    pub fn integers(&self) -> Vec<i64> {
        match self.dtype {
            "I64" => self.bytes.chunks(8).map(|b| i64::from_le_bytes(b.try_into().expect("eight bytes"))).collect(),
            "I32" => {
                let value = |b: &[u8]| i64::from(i32::from_le_bytes(b.try_into().expect("four bytes")));
                self.bytes.chunks(4).map(value).collect()
            }
            "U8" => self.bytes.iter().map(|&b| i64::from(b)).collect(),
            other => panic!("{} is {other}, not an integer tensor", self.name),
        }
    }
}
