//! What the clients of a soak ask for: short and long prompts, shared beginnings, repeated requests, chats, and
//! conversations that grow by the replies they get. All of it follows from the seed and the replies.

use std::time::Duration;

use serde_json::json;

use crate::workload::{self, Numbers, Request, Settings};

/// Beginnings that many prompts share.
const SHARED_COUNT: u64 = 8;
/// Requests that come again and again, word for word.
const REPEATED_COUNT: u64 = 48;
/// Conversations that a client leads in turn.
pub const CONVERSATIONS: u64 = 3;

/// When a client goes away before its reply is whole.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Leave {
    /// After so many tokens of the reply.
    Tokens(u64),
    /// After this time, whatever has come by then.
    Time(Duration),
}

/// One request of a client.
#[derive(Clone, Debug, PartialEq)]
pub struct Wanted {
    pub request: Request,
    pub leave: Option<Leave>,
    /// Which of the client's conversations this is a turn of.
    pub conversation: Option<usize>,
}

/// One client's requests.
pub struct Traffic {
    numbers: Numbers,
    seed: u64,
    client: u64,
    vocab_size: u64,
    /// Longest prompt.
    prompt_max: u64,
    conversations: Vec<Conversation>,
}

#[derive(Clone)]
struct Conversation {
    /// How many this client has begun in this place.
    number: u64,
    ids: Vec<u32>,
}

impl Traffic {
    /// `context`: positions of the server's window.
    pub fn new(seed: u64, client: u64, vocab_size: u64, context: u64) -> Traffic {
        let numbers = Numbers::new(seed ^ client.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x736f_616b);
        let prompt_max = (context / 2).max(16);
        let empty = Conversation { number: 0, ids: Vec::new() };
        let conversations = vec![empty; CONVERSATIONS as usize];
        Traffic { numbers, seed, client, vocab_size, prompt_max, conversations }
    }

    /// What is asked for next.
    pub fn next(&mut self) -> Wanted {
        let mut conversation = None;
        let request = match self.numbers.below(20) {
            0..8 => {
                let place = self.numbers.below(CONVERSATIONS) as usize;
                conversation = Some(place);
                self.turn(place)
            }
            8..12 => {
                let index = self.numbers.below(SHARED_COUNT);
                let mut ids = self.shared(index);
                let tail = 4 + self.numbers.below(40);
                ids.extend(workload::ids(&mut self.numbers, self.vocab_size, tail));
                self.completion(&ids)
            }
            12..15 => self.repeated(),
            15..17 => {
                let count = 1 + self.numbers.below(32);
                let ids = workload::ids(&mut self.numbers, self.vocab_size, count);
                self.completion(&ids)
            }
            17 => {
                let count = self.prompt_max / 4 + self.numbers.below(self.prompt_max * 3 / 4);
                let ids = workload::ids(&mut self.numbers, self.vocab_size, count);
                self.completion(&ids)
            }
            _ => self.chat(),
        };
        let leave = match self.numbers.below(16) {
            0 => Some(Leave::Tokens(1 + self.numbers.below(12))),
            1 => Some(Leave::Time(Duration::from_millis(1 + self.numbers.below(400)))),
            _ => None,
        };
        Wanted { request, leave, conversation }
    }

    /// A turn's whole reply: the next turn of its conversation goes on from it.
    pub fn replied(&mut self, place: usize, prompt: &[u32], reply: &[u32]) {
        let ids = &mut self.conversations[place].ids;
        ids.clear();
        ids.extend_from_slice(prompt);
        ids.extend_from_slice(reply);
    }

    fn turn(&mut self, place: usize) -> Request {
        if self.conversations[place].ids.len() as u64 > self.prompt_max {
            let conversation = &mut self.conversations[place];
            conversation.number += 1;
            conversation.ids.clear();
        }
        let mut ids = self.conversations[place].ids.clone();
        if ids.is_empty() {
            let begun = self.client + 7 * place as u64 + self.conversations[place].number;
            ids = self.shared(begun % SHARED_COUNT);
        }
        let said = 8 + self.numbers.below(56);
        ids.extend(workload::ids(&mut self.numbers, self.vocab_size, said));
        self.completion(&ids)
    }

    fn shared(&self, index: u64) -> Vec<u32> {
        let mut numbers = Numbers::new(self.seed ^ 0x7368_6172 ^ (index << 40));
        let count = self.prompt_max / 32 + numbers.below(self.prompt_max / 4);
        workload::ids(&mut numbers, self.vocab_size, count.max(1))
    }

    fn repeated(&mut self) -> Request {
        let mut numbers = Numbers::new(self.seed ^ 0x7265_7065 ^ (self.numbers.below(REPEATED_COUNT) << 40));
        let count = 1 + numbers.below(self.prompt_max / 4);
        let ids = workload::ids(&mut numbers, self.vocab_size, count);
        completion(&mut numbers, &ids)
    }

    fn chat(&mut self) -> Request {
        let settings = Settings {
            seed: self.seed ^ self.client,
            tokens: 8 + self.numbers.below(64),
            temperature: if self.numbers.below(2) == 0 { 0.0 } else { 1.0 },
            mixed: true,
            same_prompt: false,
            no_seed: self.numbers.below(2) == 0,
        };
        let (turn, index) = (self.numbers.below(4), self.numbers.below(12));
        let mut request = workload::requests(&settings, turn, 12).swap_remove(index as usize);
        if self.numbers.below(2) == 0 {
            request.body["thinking"] = json!({"type": "enabled"});
        }
        if self.numbers.below(3) == 0 {
            request.body["stop"] = json!([" a", "\n", "er"]);
        }
        request
    }

    fn completion(&mut self, ids: &[u32]) -> Request {
        completion(&mut self.numbers, ids)
    }
}

/// A request for these tokens with one of several ways of drawing.
fn completion(numbers: &mut Numbers, ids: &[u32]) -> Request {
    let longest = if numbers.below(4) == 0 { 160 } else { 32 };
    let tokens = 1 + numbers.below(longest);
    let mut request = workload::of_ids(ids, tokens, numbers.number());
    let body = &mut request.body;
    body["return_token_ids"] = true.into();
    match numbers.below(5) {
        0 => body["temperature"] = json!(0.0),
        1 => (body["temperature"], body["top_p"], body["top_k"]) = (json!(0.8), json!(0.9), json!(40)),
        2 => (body["repetition_penalty"], body["frequency_penalty"]) = (json!(1.2), json!(0.25)),
        _ => {}
    }
    if numbers.below(12) == 0 {
        body["draft"] = false.into();
    }
    if numbers.below(12) == 0 {
        body["logprobs"] = 3.into();
    }
    request
}

/// The ids of a request's prompt, where it has ids.
pub fn prompt_ids(request: &Request) -> Vec<u32> {
    let ids = request.body["prompt"].as_array();
    ids.into_iter().flatten().filter_map(|id| id.as_u64()).map(|id| id as u32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(seed: u64, client: u64, count: usize) -> Vec<Wanted> {
        let mut traffic = Traffic::new(seed, client, 1000, 2048);
        let mut all = Vec::new();
        for _ in 0..count {
            let next = traffic.next();
            if let Some(place) = next.conversation {
                traffic.replied(place, &prompt_ids(&next.request), &[1, 2, 3]);
            }
            all.push(next);
        }
        all
    }

    #[test]
    fn requests_follow_from_the_seed_and_the_replies() {
        assert_eq!(wanted(1, 2, 100), wanted(1, 2, 100));
        assert_ne!(wanted(1, 2, 100), wanted(1, 3, 100));
        assert_ne!(wanted(1, 2, 100), wanted(2, 2, 100));
    }

    #[test]
    fn every_kind_of_request_comes_and_fits_the_window() {
        let all: Vec<Wanted> = (0..8).flat_map(|client| wanted(1, client, 400)).collect();
        let has = |is: &dyn Fn(&Wanted) -> bool| all.iter().any(is);
        assert!(has(&|wanted| matches!(wanted.leave, Some(Leave::Tokens(_)))));
        assert!(has(&|wanted| matches!(wanted.leave, Some(Leave::Time(_)))));
        for field in ["stop", "draft", "logprobs", "repetition_penalty", "top_k", "messages"] {
            assert!(has(&|wanted| !wanted.request.body[field].is_null()), "{field}");
        }
        for wanted in &all {
            let tokens = wanted.request.body["max_tokens"].as_u64().unwrap();
            assert!(prompt_ids(&wanted.request).len() as u64 + tokens <= 2048);
        }
        let bodies: std::collections::BTreeMap<String, usize> = all.iter().fold(Default::default(), |mut seen, one| {
            *seen.entry(one.request.body.to_string()).or_default() += 1;
            seen
        });
        assert!(bodies.values().any(|count| *count > 3), "nothing is repeated");
    }

    #[test]
    fn a_turn_goes_on_from_the_reply_before_it_and_a_long_conversation_ends() {
        let mut traffic = Traffic::new(5, 0, 1000, 512);
        let (mut before, mut grew, mut ended) = (Vec::new(), 0, 0);
        for _ in 0..60 {
            let prompt = prompt_ids(&traffic.turn(0));
            if prompt.starts_with(&before) && !before.is_empty() {
                grew += 1
            } else {
                ended += 1
            }
            before = [&prompt[..], &[9, 9, 9]].concat();
            traffic.replied(0, &prompt, &[9, 9, 9]);
        }
        assert!(grew > 30 && ended > 2, "{grew} {ended}");
    }
}
