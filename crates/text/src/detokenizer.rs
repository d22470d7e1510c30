//! Turns the bytes of tokens into whole characters.
//!
//! A token may end inside a character; its bytes wait for the rest. Bytes that can no longer become a character are
//! shown as U+FFFD, bytes that still can are withheld, also at the end of a reply.

/// Holds back the beginning of a character.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Detokenizer {
    tail: Vec<u8>,
}

impl Detokenizer {
    /// Appends the characters that `bytes` complete to `out`.
    pub fn push(&mut self, bytes: &[u8], out: &mut String) {
        self.tail.extend_from_slice(bytes);
        let mut start = 0;
        loop {
            match std::str::from_utf8(&self.tail[start..]) {
                Ok(text) => {
                    out.push_str(text);
                    start = self.tail.len();
                    break;
                }
                Err(error) => {
                    let valid = start + error.valid_up_to();
                    out.push_str(&String::from_utf8_lossy(&self.tail[start..valid]));
                    match error.error_len() {
                        Some(broken) => {
                            out.push(char::REPLACEMENT_CHARACTER);
                            start = valid + broken;
                        }
                        None => {
                            start = valid;
                            break;
                        }
                    }
                }
            }
        }
        self.tail.drain(..start);
    }

    /// What follows is no text: bytes that wait for the rest of a character will not get it.
    pub fn interrupt(&mut self, out: &mut String) {
        if !self.tail.is_empty() {
            self.tail.clear();
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }

    /// Bytes of an unfinished character; at most three.
    pub fn withheld(&self) -> &[u8] {
        &self.tail
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(pieces: &[&[u8]]) -> (String, Vec<u8>) {
        let mut detokenizer = Detokenizer::default();
        let mut out = String::new();
        for piece in pieces {
            detokenizer.push(piece, &mut out);
            assert!(detokenizer.withheld().len() <= 3, "{pieces:?}");
        }
        (out, detokenizer.withheld().to_vec())
    }

    #[test]
    fn every_split_of_the_bytes_gives_the_same_text() {
        let texts: [&[u8]; 4] =
            ["ok 👩‍🚀 ž 漢".as_bytes(), b"a\xffb\xf0\x9f\x92c", b"\xe6\xbc", b"\xf0\x9f\x91\xa9\xf0\x9f"];
        for text in texts {
            let whole = decode(&[text]);
            for first in 0..=text.len() {
                for second in first..=text.len() {
                    let split = decode(&[&text[..first], &text[first..second], &text[second..]]);
                    assert_eq!(split, whole, "{text:?} at {first}, {second}");
                }
            }
            let bytes: Vec<&[u8]> = text.chunks(1).collect();
            assert_eq!(decode(&bytes), whole, "{text:?}");
        }
    }

    #[test]
    fn no_replacement_character_for_a_character_cut_at_the_end() {
        assert_eq!(decode(&["ž漢".as_bytes()]), ("ž漢".into(), vec![]));
        assert_eq!(decode(&[&"漢".as_bytes()[..2]]), (String::new(), "漢".as_bytes()[..2].to_vec()));
        assert_eq!(decode(&[b"a\xff"]), ("a\u{fffd}".into(), vec![]));
    }

    #[test]
    fn a_marker_inside_a_character_breaks_it() {
        let mut detokenizer = Detokenizer::default();
        let mut out = String::new();
        detokenizer.push(b"a\xe6\xbc", &mut out);
        detokenizer.interrupt(&mut out);
        detokenizer.interrupt(&mut out);
        assert_eq!((out.as_str(), detokenizer.withheld()), ("a\u{fffd}", &b""[..]));
    }
}
