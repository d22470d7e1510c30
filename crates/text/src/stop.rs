//! Finds stop strings in a text that arrives one character at a time.
//!
//! The matcher says after each character how much of the end may still become a stop string; only that has to be held
//! back. The first stop string that completes wins, of those that complete together the longest.

/// A stop string was completed by the last character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hit {
    /// Index of the stop string.
    pub stop: usize,
    /// Its length in characters.
    pub length: usize,
}

#[derive(Clone, Debug)]
struct Pattern {
    characters: Vec<char>,
    /// Length of the longest proper prefix that is also a suffix, for each prefix (Knuth, Morris, Pratt).
    fallback: Vec<usize>,
    matched: usize,
}

/// Matches a set of stop strings.
#[derive(Clone, Debug, Default)]
pub struct StopMatcher {
    patterns: Vec<Pattern>,
}

impl StopMatcher {
    /// Empty strings never match.
    pub fn new(stops: &[String]) -> StopMatcher {
        StopMatcher { patterns: stops.iter().map(|stop| Pattern::new(stop)).collect() }
    }

    pub fn is_empty(&self) -> bool {
        self.patterns.iter().all(|pattern| pattern.characters.is_empty())
    }

    /// Takes the next character of the text.
    pub fn advance(&mut self, character: char) -> Option<Hit> {
        let mut hit: Option<Hit> = None;
        for (stop, pattern) in self.patterns.iter_mut().enumerate() {
            if pattern.advance(character) {
                let length = pattern.characters.len();
                if hit.is_none_or(|hit| hit.length < length) {
                    hit = Some(Hit { stop, length });
                }
            }
        }
        hit
    }

    /// How many of the last characters may be the start of a stop string.
    pub fn held(&self) -> usize {
        self.patterns.iter().map(|pattern| pattern.matched).max().unwrap_or(0)
    }

    /// Starts anew: what comes next is another text.
    pub fn reset(&mut self) {
        self.patterns.iter_mut().for_each(|pattern| pattern.matched = 0);
    }
}

impl Pattern {
    fn new(stop: &str) -> Pattern {
        let characters: Vec<char> = stop.chars().collect();
        let mut fallback = vec![0; characters.len()];
        let mut length = 0;
        for index in 1..characters.len() {
            while length > 0 && characters[index] != characters[length] {
                length = fallback[length - 1];
            }
            if characters[index] == characters[length] {
                length += 1;
            }
            fallback[index] = length;
        }
        Pattern { characters, fallback, matched: 0 }
    }

    fn advance(&mut self, character: char) -> bool {
        if self.characters.is_empty() {
            return false;
        }
        if self.matched == self.characters.len() {
            self.matched = self.fallback[self.matched - 1];
        }
        while self.matched > 0 && self.characters[self.matched] != character {
            self.matched = self.fallback[self.matched - 1];
        }
        if self.characters[self.matched] == character {
            self.matched += 1;
        }
        self.matched == self.characters.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Text shown, and the stop string that ended it; what is shown before the end must never be taken back.
    fn run(text: &str, stops: &[&str]) -> (String, Option<usize>) {
        let stops: Vec<String> = stops.iter().map(|stop| stop.to_string()).collect();
        let mut matcher = StopMatcher::new(&stops);
        let mut held = String::new();
        let mut shown = String::new();
        for character in text.chars() {
            held.push(character);
            if let Some(hit) = matcher.advance(character) {
                shown.extend(held.chars().take(held.chars().count() - hit.length));
                return (shown, Some(hit.stop));
            }
            let free = held.chars().count() - matcher.held();
            shown.extend(held.chars().take(free));
            held = held.chars().skip(free).collect();
        }
        shown.push_str(&held);
        (shown, None)
    }

    #[test]
    fn text_ends_before_the_stop_string_and_nothing_of_it_is_shown() {
        let cases: [(&str, &[&str], &str, Option<usize>); 12] = [
            ("alpha beta gamma delta", &["beta gamma"], "alpha ", Some(0)),
            ("a\nUser:b", &["\nUser:"], "a", Some(0)),
            ("aaab", &["aab"], "a", Some(0)),
            ("ababac", &["abac"], "ab", Some(0)),
            ("one two three four", &["three", "two", "four", "ne"], "o", Some(3)),
            ("abc", &["abc", "c"], "", Some(0)),
            ("abc", &["abcd", "b"], "a", Some(1)),
            ("abcx", &["abcd", "bce"], "abcx", None),
            ("ab", &["abc"], "ab", None),
            ("é漢é", &["漢é"], "é", Some(0)),
            ("x", &[""], "x", None),
            ("", &["x"], "", None),
        ];
        for (text, stops, shown, stop) in cases {
            assert_eq!(run(text, stops), (shown.into(), stop), "{text:?} {stops:?}");
        }
    }

    #[test]
    fn agrees_with_a_search_in_the_whole_text() {
        // All texts of eight letters from {a, b} against overlapping stop strings.
        let stops = ["abb", "bab", "aabaa", "bbbb"];
        for code in 0..1u32 << 8 {
            let text: String = (0..8).map(|bit| if code >> bit & 1 == 0 { 'a' } else { 'b' }).collect();
            let first = (1..=text.len()).find_map(|end| {
                let ended = |stop: &&&str| text[..end].ends_with(**stop);
                stops.iter().filter(ended).map(|stop| stop.len()).max().map(|length| text[..end - length].to_string())
            });
            assert_eq!(run(&text, &stops).0, first.unwrap_or(text.clone()), "{text}");
        }
    }

    #[test]
    fn only_the_possible_start_of_a_stop_string_is_held() {
        let mut matcher = StopMatcher::new(&["stop".into()]);
        let held: Vec<usize> =
            "sst sto".chars().map(|character| (matcher.advance(character), matcher.held()).1).collect();
        assert_eq!(held, [1, 1, 2, 0, 1, 2, 3]);
        matcher.reset();
        assert_eq!((matcher.advance('p'), matcher.held()), (None, 0));
    }
}
