//! The bytes of a file: a header with its own checksum, the state, whole pages, and a checksum over all of it.
//!
//! Little endian. The header says how long the file is, so that one cut short shows before anything is read. A file holds
//! the pages from `first_page` on; those before are in the file that it builds on.

use std::sync::Arc;

use sha2::{Digest, Sha256};
use tf_text::TokenId;

use super::{DiskIdentity, Refusal};
use crate::request::Position;

const MAGIC: [u8; 8] = *b"TFKEPT\r\n";
const VERSION: u32 = 1;
/// Bytes before the tokens.
pub const FIXED_BYTES: usize = 80;
/// Bytes of a checksum.
pub const CHECKSUM_BYTES: usize = 32;
const EXTENSION: &str = ".tfkept";
const PARTIAL: &str = ".partial";

/// SHA-256.
pub type Checksum = [u8; CHECKSUM_BYTES];

/// Names a file of a directory; later files have larger numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId(pub u64);

impl FileId {
    /// The name of a finished file.
    pub fn name(self) -> String {
        format!("{:016x}{EXTENSION}", self.0)
    }

    /// The name while it is being written.
    pub fn partial_name(self) -> String {
        format!("{:016x}{EXTENSION}{PARTIAL}", self.0)
    }

    /// The file of this name, and whether it was never finished. `None` for names that are not ours.
    pub fn of_name(name: &str) -> Option<(FileId, bool)> {
        let (name, is_partial) = name.strip_suffix(PARTIAL).map_or((name, false), |name| (name, true));
        let digits = name.strip_suffix(EXTENSION)?;
        let is_ours = digits.len() == 16 && digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let id = u64::from_str_radix(digits, 16).ok().filter(|&id| is_ours && id > 0)?;
        Some((FileId(id), is_partial))
    }
}

/// What stands before the state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    pub identity: DiskIdentity,
    /// The prefix.
    pub tokens: Arc<[TokenId]>,
    /// The file that holds the pages before `first_page`, where there are any.
    pub base: Option<FileId>,
    pub first_page: u32,
    pub page_count: u32,
    pub page_bytes: u32,
    /// Positions of one page.
    pub page_positions: u32,
    pub state_bytes: u32,
    /// The state serves prompts that end here or later.
    pub resumes_from: Position,
}

impl Header {
    /// Bytes before the state, the header's checksum included.
    pub fn header_bytes(token_count: usize) -> u64 {
        (FIXED_BYTES + CHECKSUM_BYTES) as u64 + 4 * token_count as u64
    }

    /// Whether the pages before this file's are in one with `base`'s header: whole pages of the same tokens.
    pub fn builds_on(&self, base: &Header) -> bool {
        let shared = u64::from(self.first_page) * u64::from(self.page_positions);
        let same = self.tokens.iter().zip(base.tokens.iter()).take_while(|(one, other)| one == other).count();
        base.page_positions == self.page_positions && base.pages_end() >= self.first_page && same as u64 >= shared
    }

    /// State and pages.
    pub fn body_bytes(&self) -> u64 {
        u64::from(self.state_bytes) + u64::from(self.page_count) * u64::from(self.page_bytes)
    }

    /// Bytes of the whole file.
    pub fn file_bytes(&self) -> u64 {
        Self::header_bytes(self.tokens.len()) + self.body_bytes() + CHECKSUM_BYTES as u64
    }

    /// Pages up to the end of this file's.
    pub fn pages_end(&self) -> u32 {
        self.first_page + self.page_count
    }

    /// The header's bytes, its checksum last.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(Self::header_bytes(self.tokens.len()) as usize);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((self.tokens.len() as u32).to_le_bytes());
        bytes.extend(self.identity.0);
        bytes.extend(self.base.map_or(0, |base| base.0).to_le_bytes());
        let sizes = [self.first_page, self.page_count, self.page_bytes, self.page_positions, self.state_bytes];
        for number in sizes.into_iter().chain([self.resumes_from]) {
            bytes.extend(number.to_le_bytes());
        }
        assert_eq!(bytes.len(), FIXED_BYTES, "the fixed part has this many bytes");
        for &token in self.tokens.iter() {
            bytes.extend(token.to_le_bytes());
        }
        let checksum: Checksum = Sha256::digest(&bytes).into();
        bytes.extend(checksum);
        bytes
    }
}

/// The fixed part, as far as it can be judged without the rest.
pub struct Fixed {
    pub token_count: usize,
    pub body_bytes: u64,
}

/// Looks at the first [`FIXED_BYTES`] of a file of `file_bytes`.
///
/// # Errors
/// Why the file is not read any further.
pub fn judge(fixed: &[u8; FIXED_BYTES], file_bytes: u64, identity: DiskIdentity) -> Result<Fixed, (Refusal, String)> {
    if fixed[..8] != MAGIC {
        return Err((Refusal::Foreign, "it doesn't begin like one of ours".to_owned()));
    }
    let version = number(fixed, 8);
    if version != VERSION {
        return Err((Refusal::Stale, format!("its format is {version}, this build reads {VERSION}")));
    }
    if fixed[16..48] != identity.0 {
        return Err((Refusal::Stale, "another checkpoint, build, backend or numeric mode wrote it".to_owned()));
    }
    let token_count = number(fixed, 12) as usize;
    let [page_count, page_bytes, state_bytes] = [60, 64, 72].map(|at| u64::from(number(fixed, at)));
    let body_bytes = state_bytes.saturating_add(page_count.saturating_mul(page_bytes));
    let expected = Header::header_bytes(token_count).saturating_add(body_bytes).saturating_add(CHECKSUM_BYTES as u64);
    if expected != file_bytes || token_count == 0 {
        return Err((Refusal::Damaged, format!("it has {file_bytes} bytes, its header says {expected}")));
    }
    Ok(Fixed { token_count, body_bytes })
}

/// Reads a whole header, its checksum included. `bytes` has the length that [`judge`] found.
///
/// # Errors
/// [`Refusal::Damaged`] when a bit differs.
pub fn decode(bytes: &[u8]) -> Result<(Header, Checksum), (Refusal, String)> {
    let damaged = || (Refusal::Damaged, "the checksum of its header differs".to_owned());
    let (content, claimed) = bytes.split_at_checked(bytes.len().saturating_sub(CHECKSUM_BYTES)).ok_or_else(damaged)?;
    let checksum: Checksum = Sha256::digest(content).into();
    if checksum != claimed || content.len() < FIXED_BYTES {
        return Err(damaged());
    }
    let mut identity = [0; 32];
    identity.copy_from_slice(&content[16..48]);
    let base = u64::from(number(content, 48)) | u64::from(number(content, 52)) << 32;
    let tokens = content[FIXED_BYTES..].chunks_exact(4).map(|bytes| number(bytes, 0)).collect();
    let header = Header {
        identity: DiskIdentity(identity),
        tokens,
        base: (base > 0).then_some(FileId(base)),
        first_page: number(content, 56),
        page_count: number(content, 60),
        page_bytes: number(content, 64),
        page_positions: number(content, 68),
        state_bytes: number(content, 72),
        resumes_from: number(content, 76),
    };
    Ok((header, checksum))
}

fn number(bytes: &[u8], at: usize) -> u32 {
    let mut four = [0; 4];
    four.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(four)
}

/// The checksum over a file's body; it begins with the header's, so that no part of two files can be exchanged.
pub fn body_digest(header: &Checksum) -> Sha256 {
    let mut digest = Sha256::new();
    digest.update(header);
    digest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            identity: DiskIdentity::of(&["a", "b"]),
            tokens: vec![3, 1, 70_000].into(),
            base: Some(FileId(1 << 40)),
            first_page: 2,
            page_count: 5,
            page_bytes: 64,
            page_positions: 4,
            state_bytes: 11,
            resumes_from: 4,
        }
    }

    fn fixed(bytes: &[u8]) -> [u8; FIXED_BYTES] {
        bytes[..FIXED_BYTES].try_into().expect("a header is longer than its fixed part")
    }

    #[test]
    fn a_header_comes_back_and_no_changed_bit_passes() {
        let header = header();
        let bytes = header.encode();
        assert_eq!(bytes.len() as u64, Header::header_bytes(3));
        let judged = judge(&fixed(&bytes), header.file_bytes(), header.identity).expect("it is whole");
        assert_eq!((judged.token_count, judged.body_bytes), (3, 11 + 5 * 64));
        assert_eq!(decode(&bytes).expect("it is whole").0, header);
        for bit in 0..bytes.len() * 8 {
            let mut edited = bytes.clone();
            edited[bit / 8] ^= 1 << (bit % 8);
            assert!(decode(&edited).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn each_kind_of_wrong_file_has_its_reason() {
        let header = header();
        let bytes = header.encode();
        let why = |edit: &dyn Fn(&mut Vec<u8>), length: u64| {
            let mut edited = bytes.clone();
            edit(&mut edited);
            judge(&fixed(&edited), length, header.identity).err().map(|(reason, _)| reason)
        };
        let length = header.file_bytes();
        assert_eq!(why(&|_| {}, length), None);
        assert_eq!(why(&|bytes| bytes[0] = b'P', length), Some(Refusal::Foreign));
        assert_eq!(why(&|bytes| bytes[8] = 9, length), Some(Refusal::Stale));
        assert_eq!(why(&|bytes| bytes[20] ^= 1, length), Some(Refusal::Stale));
        assert_eq!(why(&|_| {}, length - 1), Some(Refusal::Damaged));
        assert_eq!(why(&|_| {}, length + 1), Some(Refusal::Damaged));
        // Sizes that no disk holds don't overflow and are never allocated.
        assert_eq!(why(&|bytes| bytes[60..76].fill(255), length), Some(Refusal::Damaged));
        assert_eq!(why(&|bytes| bytes[12..16].fill(255), length), Some(Refusal::Damaged));
    }

    #[test]
    fn only_own_names_are_read() {
        let id = FileId(0xab);
        assert_eq!(FileId::of_name(&id.name()), Some((id, false)));
        assert_eq!(FileId::of_name(&id.partial_name()), Some((id, true)));
        let others = [
            "",
            "lock",
            "ab.tfkept",
            "../00000000000000ab.tfkept",
            "00000000000000AB.tfkept",
            "00000000000000ab.txt",
            "+0000000000000ab.tfkept",
            "0000000000000000.tfkept",
            "00000000000000ab.tfkept.partial.partial",
        ];
        for name in others {
            assert_eq!(FileId::of_name(name), None, "{name}");
        }
    }
}
