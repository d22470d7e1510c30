//! Reply tokens that are given and not drawn: the end of a reasoning whose budget is spent, the opening of a call that
//! was asked for.
//!
//! Which tokens are given depends on the reply's own tokens and on nothing else, so a reply is the same drafted, alone or
//! resumed. They enter a window as known rows: their rows must be computed, their draws are dropped.

use tf_text::TokenId;

/// Longest cycle that the loop guard knows.
pub const CYCLE_MAX: usize = 8;
/// So many tokens must be a cycle.
pub const CYCLE_TOKENS: u32 = 256;
/// First tokens of a reasoning that the loop guard doesn't look at.
pub const CYCLE_WARM_UP: u32 = 64;

/// An open reasoning at the beginning of a reply, and what may end it from outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reasoning {
    /// The token that ends it.
    pub close: TokenId,
    /// After so many tokens without `close` the tokens of `closing` are given.
    pub budget: Option<u32>,
    /// Gives `closing` too when the reasoning has become an exact cycle.
    pub loop_guard: bool,
    /// Ends the reasoning; `close` is one of these.
    pub closing: Vec<TokenId>,
}

/// What is given in one reply.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Forcing {
    /// `None`: the reply begins with its answer.
    pub reasoning: Option<Reasoning>,
    /// The tokens that the answer begins with, after `close` or `closing`.
    pub opening: Vec<TokenId>,
}

impl Forcing {
    /// Every token that may be given.
    pub fn tokens(&self) -> impl Iterator<Item = TokenId> + '_ {
        let closing = self.reasoning.iter().flat_map(|reasoning| &reasoning.closing);
        closing.chain(&self.opening).copied()
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    Reasoning,
    /// So many tokens of `closing` were given.
    Closing(u32),
    Opening(u32),
    /// Everything that follows is drawn.
    #[default]
    Free,
}

/// How far a reply has come in its [`Forcing`]: a pure function of its tokens, one step a token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Forced {
    stage: Stage,
    /// Tokens of the reasoning.
    length: u32,
    cycle: Cycle,
    /// The period of the cycle that the loop guard ended.
    pub looped: Option<u32>,
}

impl Forced {
    /// Before the first token.
    pub fn new(forcing: Option<&Forcing>) -> Self {
        let mut forced = Forced::default();
        if let Some(forcing) = forcing {
            forced.stage = match &forcing.reasoning {
                None => opening(forcing),
                Some(Reasoning { budget: Some(0), .. }) => closing(forcing),
                Some(_) => Stage::Reasoning,
            };
        }
        forced
    }

    /// Takes in the reply's next token.
    pub fn push(&mut self, forcing: &Forcing, token: TokenId) {
        self.stage = match (self.stage, &forcing.reasoning) {
            (Stage::Reasoning, Some(reasoning)) => self.reason(forcing, reasoning, token),
            (Stage::Closing(given), Some(reasoning)) if (given as usize) + 1 < reasoning.closing.len() => {
                Stage::Closing(given + 1)
            }
            (Stage::Reasoning | Stage::Closing(_), _) => opening(forcing),
            (Stage::Opening(given), _) if (given as usize) + 1 < forcing.opening.len() => Stage::Opening(given + 1),
            (Stage::Opening(_) | Stage::Free, _) => Stage::Free,
        };
    }

    fn reason(&mut self, forcing: &Forcing, reasoning: &Reasoning, token: TokenId) -> Stage {
        if token == reasoning.close {
            return opening(forcing);
        }
        self.length += 1;
        if reasoning.loop_guard && self.length > CYCLE_WARM_UP {
            self.looped = self.cycle.push(token);
        }
        if self.looped.is_some() || reasoning.budget.is_some_and(|budget| self.length >= budget) {
            closing(forcing)
        } else {
            Stage::Reasoning
        }
    }

    /// Whether the next token is given.
    pub fn is_given(&self) -> bool {
        matches!(self.stage, Stage::Closing(_) | Stage::Opening(_))
    }

    /// Writes the tokens that are given next to `given`; none while the next one is drawn.
    pub fn given(&self, forcing: &Forcing, given: &mut Vec<TokenId>) {
        given.clear();
        match (self.stage, &forcing.reasoning) {
            (Stage::Closing(first), Some(reasoning)) => {
                given.extend_from_slice(&reasoning.closing[first as usize..]);
                given.extend_from_slice(&forcing.opening);
            }
            (Stage::Opening(first), _) => given.extend_from_slice(&forcing.opening[first as usize..]),
            (Stage::Closing(_) | Stage::Reasoning | Stage::Free, _) => {}
        }
    }

    /// Most tokens that may be drawn before one is given for certain; `None` is no limit.
    pub fn drawn_max(&self, forcing: &Forcing) -> Option<u32> {
        match (self.stage, &forcing.reasoning) {
            (Stage::Reasoning, Some(reasoning)) => reasoning.budget.map(|budget| budget - self.length),
            (Stage::Closing(_) | Stage::Opening(_), _) => Some(0),
            (Stage::Reasoning | Stage::Free, _) => None,
        }
    }
}

fn closing(forcing: &Forcing) -> Stage {
    match &forcing.reasoning {
        Some(reasoning) if !reasoning.closing.is_empty() => Stage::Closing(0),
        Some(_) | None => opening(forcing),
    }
}

fn opening(forcing: &Forcing) -> Stage {
    if forcing.opening.is_empty() { Stage::Free } else { Stage::Opening(0) }
}

/// Looks for a short cycle in the newest tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Cycle {
    /// The newest tokens, by their count modulo the longest cycle.
    recent: [TokenId; CYCLE_MAX],
    count: u32,
    /// For each period less one, how many of the newest tokens equal the one a period before.
    repeats: [u32; CYCLE_MAX],
}

impl Cycle {
    /// The shortest period that the newest tokens have had for long enough.
    fn push(&mut self, token: TokenId) -> Option<u32> {
        let mut found = None;
        for period in 1..=CYCLE_MAX as u32 {
            let repeats = &mut self.repeats[period as usize - 1];
            let is_repeat = self.count >= period && self.recent[(self.count - period) as usize % CYCLE_MAX] == token;
            *repeats = if is_repeat { *repeats + 1 } else { 0 };
            if *repeats + period >= CYCLE_TOKENS && found.is_none() {
                found = Some(period);
            }
        }
        self.recent[self.count as usize % CYCLE_MAX] = token;
        self.count += 1;
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLOSE: TokenId = 90;

    fn forcing(budget: Option<u32>, loop_guard: bool, opening: &[TokenId]) -> Forcing {
        let closing = vec![80, CLOSE, 81];
        Forcing { reasoning: Some(Reasoning { close: CLOSE, budget, loop_guard, closing }), opening: opening.to_vec() }
    }

    /// The reply where `draws` are drawn, with the given tokens among them.
    fn reply(forcing: &Forcing, draws: impl IntoIterator<Item = TokenId>) -> (Vec<TokenId>, Forced) {
        let mut forced = Forced::new(Some(forcing));
        let mut reply = Vec::new();
        let mut given = Vec::new();
        let mut draws = draws.into_iter();
        loop {
            forced.given(forcing, &mut given);
            assert_eq!(forced.is_given(), !given.is_empty());
            let Some(token) = given.first().copied().or_else(|| draws.next()) else { return (reply, forced) };
            reply.push(token);
            forced.push(forcing, token);
        }
    }

    #[test]
    fn gives_the_end_of_a_reasoning_and_the_opening_of_a_call() {
        // budget, opening, draws -> reply
        type Case<'a> = (&'a str, Option<u32>, &'a [u32], &'a [u32], &'a [u32]);
        let cases: [Case<'_>; 8] = [
            ("within the budget", Some(3), &[], &[1, 2, CLOSE, 4], &[1, 2, CLOSE, 4]),
            ("at the budget", Some(3), &[], &[1, 2, 3, 4, 5], &[1, 2, 3, 80, CLOSE, 81, 4, 5]),
            ("closed by its last token", Some(3), &[], &[1, 2, CLOSE, 4], &[1, 2, CLOSE, 4]),
            ("no budget", None, &[], &[1, 2, 3, 4], &[1, 2, 3, 4]),
            ("nothing to spend", Some(0), &[], &[4, 5], &[80, CLOSE, 81, 4, 5]),
            ("a call after a drawn end", Some(9), &[70, 71], &[1, CLOSE, 4], &[1, CLOSE, 70, 71, 4]),
            ("a call after a given end", Some(1), &[70, 71], &[1, 4], &[1, 80, CLOSE, 81, 70, 71, 4]),
            ("a second end is a token", None, &[70], &[CLOSE, CLOSE, 4], &[CLOSE, 70, CLOSE, 4]),
        ];
        for (name, budget, opening, draws, expected) in cases {
            assert_eq!(reply(&forcing(budget, false, opening), draws.iter().copied()).0, expected, "{name}");
        }
        let answer = Forcing { reasoning: None, opening: vec![70, 71] };
        assert_eq!(reply(&answer, [1, 2]).0, [70, 71, 1, 2]);
        assert_eq!(reply(&Forcing::default(), [1, 2]).0, [1, 2]);
    }

    #[test]
    fn ends_an_exact_cycle_and_nothing_else() {
        let warm_up = || (0..CYCLE_WARM_UP).map(|index| 100 + index);
        for period in 1..=CYCLE_MAX as u32 + 1 {
            let cycle = |count: u32| (0..count).map(move |index| index % period);
            let ends = period <= CYCLE_MAX as u32;
            let (tokens, forced) = reply(&forcing(None, true, &[]), warm_up().chain(cycle(CYCLE_TOKENS)));
            assert_eq!(forced.looped, ends.then_some(period), "a cycle of {period}");
            assert_eq!(tokens.ends_with(&[80, CLOSE, 81]), ends, "a cycle of {period}");
            // One token fewer, one that breaks it, tokens of the warm-up, and the guard switched off.
            let broken = cycle(CYCLE_TOKENS / 2).chain([55]).chain(cycle(CYCLE_TOKENS / 2));
            assert_eq!(reply(&forcing(None, true, &[]), warm_up().chain(cycle(CYCLE_TOKENS - 1))).1.looped, None);
            assert_eq!(reply(&forcing(None, true, &[]), warm_up().chain(broken)).1.looped, None);
            assert_eq!(reply(&forcing(None, true, &[]), cycle(CYCLE_TOKENS)).1.looped, None);
            assert_eq!(reply(&forcing(None, false, &[]), warm_up().chain(cycle(CYCLE_TOKENS))).1.looped, None);
        }
    }

    #[test]
    fn says_how_many_draws_are_left() {
        let forcing = forcing(Some(3), false, &[]);
        let mut forced = Forced::new(Some(&forcing));
        let mut left = Vec::new();
        for token in [1, 2, 3, 80, CLOSE, 81, 5] {
            left.push(forced.drawn_max(&forcing));
            forced.push(&forcing, token);
        }
        assert_eq!(left, [Some(3), Some(2), Some(1), Some(0), Some(0), Some(0), None]);
    }
}
