//! What the machine code of a cubin says about a kernel.
//!
//! A launch that may start while the one before it runs needs a kernel that waits for that one itself. Whether it does is
//! read off the code that will run, so that no launcher can claim it for a kernel that doesn't.

/// The low bits of the instruction that `griddepcontrol.wait` becomes on every architecture that has it.
const WAIT: u64 = 0x82e;
const OPERATION_BITS: u64 = 0xfff;
const INSTRUCTION_BYTES: usize = 16;

/// Whether the entry's code waits somewhere for the launch before it. `false` where the file is not as expected.
pub(super) fn waits(cubin: &[u8], entry: &str) -> bool {
    code_of(cubin, entry).is_some_and(|code| {
        let mut instructions = code.chunks_exact(INSTRUCTION_BYTES).filter_map(|bytes| number(bytes, 0, 8));
        instructions.any(|word| word & OPERATION_BITS == WAIT)
    })
}

/// The section `.text.<entry>` of a 64-bit little-endian ELF file.
fn code_of<'a>(cubin: &'a [u8], entry: &str) -> Option<&'a [u8]> {
    if !cubin.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let sections = number(cubin, 0x28, 8)? as usize;
    let [size, count, names] = [0x3a, 0x3c, 0x3e].map(|at| number(cubin, at, 2).map(|value| value as usize));
    let header = |index: usize| cubin.get(sections.checked_add(index.checked_mul(size?)?)?..);
    let bytes = |header: &[u8]| {
        let (first, length) = (number(header, 0x18, 8)? as usize, number(header, 0x20, 8)? as usize);
        cubin.get(first..first.checked_add(length)?)
    };
    let names = bytes(header(names?)?)?;
    (0..count?).filter_map(header).find_map(|header| {
        let name = names.get(number(header, 0, 4)? as usize..)?;
        let rest = name.strip_prefix(b".text.")?.strip_prefix(entry.as_bytes())?;
        if rest.first() == Some(&0) { bytes(header) } else { None }
    })
}

/// The little-endian number of `bytes` bytes at `at`.
fn number(from: &[u8], at: usize, bytes: usize) -> Option<u64> {
    let digits = from.get(at..at.checked_add(bytes)?)?;
    Some(digits.iter().rev().fold(0, |value, digit| value << 8 | u64::from(*digit)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with the sections of these names and codes.
    fn file(codes: &[(&str, &[u64])]) -> Vec<u8> {
        let mut bytes = vec![0; 0x40];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        let (mut headers, mut names) = (Vec::new(), vec![0]);
        let mut section = |bytes: &mut Vec<u8>, name: usize, content: &[u8]| {
            let mut header = [0; 0x40];
            header[..4].copy_from_slice(&(name as u32).to_le_bytes());
            header[0x18..0x20].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
            header[0x20..0x28].copy_from_slice(&(content.len() as u64).to_le_bytes());
            bytes.extend_from_slice(content);
            headers.extend_from_slice(&header);
        };
        for (entry, code) in codes {
            let content: Vec<u8> = code.iter().flat_map(|word| [*word, 0]).flat_map(u64::to_le_bytes).collect();
            section(&mut bytes, names.len(), &content);
            names.extend_from_slice(format!(".text.{entry}\0").as_bytes());
        }
        section(&mut bytes, 0, &names.clone());
        let first = bytes.len() as u64;
        bytes[0x28..0x30].copy_from_slice(&first.to_le_bytes());
        for (at, value) in [(0x3a, 0x40), (0x3c, codes.len() + 1), (0x3e, codes.len())] {
            bytes[at..at + 2].copy_from_slice(&(value as u16).to_le_bytes());
        }
        bytes.extend_from_slice(&headers);
        bytes
    }

    #[test]
    fn a_wait_is_seen_in_the_code_of_its_own_entry() {
        let waiting = [0x7a24, 0x782e, 0x794d];
        let cubin = file(&[("norm", &[0x7a24, 0x794d]), ("norm_wide", &waiting), ("wide", &[0x782d, 0x882f])]);
        for (entry, expected) in [("norm", false), ("norm_wide", true), ("wide", false), ("no", false), ("", false)] {
            assert_eq!(waits(&cubin, entry), expected, "{entry}");
        }
    }

    #[test]
    fn a_file_that_is_cut_short_waits_for_nothing_and_is_no_panic() {
        let cubin = file(&[("norm", &[0x782e])]);
        assert!(waits(&cubin, "norm"));
        // The rest of the last header says nothing.
        for length in 0..cubin.len() - 0x40 {
            assert!(!waits(&cubin[..length], "norm"), "{length} bytes");
        }
        assert!(!waits(b"// text", "norm"));
    }
}
