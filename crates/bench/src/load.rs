//! Requests as streams, many at once: what each reply says, and when.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::client::{Client, ClientError};
use crate::workload::Request;

/// What the client saw of one reply. What the server didn't say is `None`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reply {
    pub token_sha: Option<String>,
    pub prompt_tokens: Option<u64>,
    pub cached_tokens: Option<u64>,
    pub reply_tokens: Option<u64>,
    pub drafted: Option<u64>,
    pub accepted: Option<u64>,
    pub finish: Option<String>,
    /// Why there is no whole reply.
    pub failure: Option<String>,
    /// When it was sent, from the start of its group.
    pub sent: Duration,
    /// When it was over, from the start of its group.
    pub ended: Duration,
    /// For each chunk that brought tokens: when, from the start of its group, and how many the reply had by then.
    pub progress: Vec<(Duration, u64)>,
}

impl Reply {
    /// From sending to the first token.
    pub fn first_token(&self) -> Option<Duration> {
        self.progress.first().map(|(time, _)| time.saturating_sub(self.sent))
    }

    /// Tokens a second after the first chunk.
    pub fn rate(&self) -> Option<f64> {
        let ((first, before), (last, after)) = (self.progress.first()?, self.progress.last()?);
        let seconds = last.saturating_sub(*first).as_secs_f64();
        (seconds > 0.0).then(|| (after - before) as f64 / seconds)
    }

    /// Times between chunks that brought tokens.
    pub fn gaps(&self) -> impl Iterator<Item = Duration> {
        self.progress.windows(2).map(|pair| pair[1].0.saturating_sub(pair[0].0))
    }

    /// Tokens that had come by `time`.
    fn tokens_by(&self, time: Duration) -> u64 {
        self.progress.iter().take_while(|(at, _)| *at <= time).last().map_or(0, |(_, tokens)| *tokens)
    }
}

/// Tokens a second of all replies while all of them were being written; `None` when there was no such time.
pub fn steady_rate(replies: &[Reply]) -> Option<f64> {
    let from = replies.iter().map(|reply| reply.progress.first().map(|(time, _)| *time)).max()??;
    let to = replies.iter().map(|reply| reply.progress.last().map(|(time, _)| *time)).min()??;
    let seconds = to.checked_sub(from).filter(|time| !time.is_zero())?.as_secs_f64();
    let tokens: u64 = replies.iter().map(|reply| reply.tokens_by(to) - reply.tokens_by(from)).sum();
    Some(tokens as f64 / seconds)
}

/// Sends `request` and reads its reply to the end. Times count from `start`.
pub async fn ask(client: &Client, request: &Request, start: Instant) -> Reply {
    let mut body = request.body.clone();
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true, "continuous_usage_stats": true});
    let mut reply = Reply { sent: start.elapsed(), ..Reply::default() };
    let ended = client
        .stream(request.path, &body, |event| {
            take(&mut reply, &event, start.elapsed());
            match &event["error"] {
                Value::Null => Ok(()),
                error => Err(ClientError::Broken { path: request.path.to_owned(), cause: error.to_string() }),
            }
        })
        .await;
    reply.ended = start.elapsed();
    match ended {
        Err(error) => reply.failure = Some(error.to_string()),
        Ok(()) if reply.finish.is_none() => reply.failure = Some("the stream has no finish_reason".to_owned()),
        Ok(()) => {}
    }
    reply
}

pub(crate) fn take(reply: &mut Reply, event: &Value, now: Duration) {
    let usage = &event["usage"];
    if usage.is_object() {
        reply.prompt_tokens = usage["prompt_tokens"].as_u64().or(reply.prompt_tokens);
        reply.reply_tokens = usage["completion_tokens"].as_u64().or(reply.reply_tokens);
    }
    // Running usage may not know yet what was cached; the last one does.
    let is_last_usage = event["choices"].as_array().is_some_and(Vec::is_empty);
    if is_last_usage {
        reply.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"].as_u64();
    }
    if let Some(tokens) = usage["completion_tokens"].as_u64()
        && !is_last_usage
        && tokens > reply.progress.last().map_or(0, |(_, tokens)| *tokens)
    {
        reply.progress.push((now, tokens));
    }
    if let Some(finish) = event["choices"][0]["finish_reason"].as_str() {
        reply.finish = Some(finish.to_owned());
    }
    if let Some(sha) = event["tensorfold"]["token_sha"].as_str() {
        reply.token_sha = Some(sha.to_owned());
    }
    if event["timings"].is_object() {
        reply.drafted = event["timings"]["draft_n"].as_u64();
        reply.accepted = event["timings"]["draft_n_accepted"].as_u64();
    }
}

/// Sends all requests at once, or `stagger` apart, and waits for all replies. In the order of `requests`.
pub async fn together(client: &Client, requests: &[Request], stagger: Duration) -> Vec<Reply> {
    let offsets: Vec<Duration> = (0..requests.len()).map(|index| stagger * index as u32).collect();
    at(client, requests, &offsets).await
}

/// Sends each request at its time after the start.
pub async fn at(client: &Client, requests: &[Request], offsets: &[Duration]) -> Vec<Reply> {
    let start = Instant::now();
    let tasks = requests.iter().zip(offsets).map(|(request, offset)| {
        let (client, request, offset) = (client.clone(), request.clone(), *offset);
        tokio::spawn(async move {
            tokio::time::sleep(offset).await;
            ask(&client, &request, start).await
        })
    });
    join_all(tasks.collect::<Vec<_>>()).await.into_iter().map(|reply| reply.unwrap_or_else(lost)).collect()
}

/// Sends the requests in order, `concurrency` of them running at any time.
pub async fn at_most(client: &Client, requests: &[Request], concurrency: usize) -> Vec<Reply> {
    let start = Instant::now();
    let places = std::sync::Arc::new(tokio::sync::Semaphore::new(concurrency.max(1)));
    let tasks = requests.iter().map(|request| {
        let (client, request, places) = (client.clone(), request.clone(), places.clone());
        tokio::spawn(async move {
            let _place = places.acquire().await;
            ask(&client, &request, start).await
        })
    });
    join_all(tasks.collect::<Vec<_>>()).await.into_iter().map(|reply| reply.unwrap_or_else(lost)).collect()
}

fn lost(error: tokio::task::JoinError) -> Reply {
    Reply { failure: Some(error.to_string()), ..Reply::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(progress: &[(u64, u64)]) -> Reply {
        let progress = progress.iter().map(|(ms, tokens)| (Duration::from_millis(*ms), *tokens)).collect();
        Reply { progress, sent: Duration::from_millis(50), ..Reply::default() }
    }

    #[test]
    fn rates_count_the_tokens_after_the_first_chunk() {
        let one = reply(&[(100, 2), (600, 7), (1100, 12)]);
        assert_eq!(one.rate(), Some(10.0));
        assert_eq!(one.first_token(), Some(Duration::from_millis(50)));
        assert_eq!(one.gaps().collect::<Vec<_>>(), [Duration::from_millis(500); 2]);
        assert_eq!(reply(&[(100, 2)]).rate(), None);
        assert_eq!(reply(&[]).first_token(), None);
    }

    #[test]
    fn the_steady_rate_counts_the_time_when_all_were_writing() {
        let (one, other) = (reply(&[(0, 1), (1000, 11), (2000, 21)]), reply(&[(1000, 1), (2000, 6), (3000, 11)]));
        // From 1000 to 2000 ms: ten tokens and five.
        assert_eq!(steady_rate(&[one.clone(), other]), Some(15.0));
        assert_eq!(steady_rate(&[one.clone(), reply(&[])]), None, "one never wrote");
        assert_eq!(steady_rate(&[one, reply(&[(5000, 1), (6000, 2)])]), None, "never at the same time");
        assert_eq!(steady_rate(&[]), None);
    }

    #[test]
    fn a_reply_is_read_from_its_chunks_and_the_rest_stays_unknown() {
        let mut found = Reply::default();
        let chunks = [
            json!({"choices": [{"delta": {"role": "assistant"}}], "usage": {"prompt_tokens": 3, "completion_tokens": 0}}),
            json!({"choices": [{"delta": {"content": "a"}}], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}),
            json!({"choices": [{"delta": {}, "finish_reason": "length"}],
                   "usage": {"prompt_tokens": 3, "completion_tokens": 2}, "tensorfold": {"token_sha": "ab"}}),
            json!({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}),
        ];
        for (index, chunk) in chunks.iter().enumerate() {
            take(&mut found, chunk, Duration::from_millis(index as u64));
        }
        let expected = Reply {
            token_sha: Some("ab".into()),
            prompt_tokens: Some(3),
            reply_tokens: Some(2),
            finish: Some("length".into()),
            progress: vec![(Duration::from_millis(1), 2)],
            ..Reply::default()
        };
        assert_eq!(found, expected);
        take(
            &mut found,
            &json!({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 0}}}),
            Duration::ZERO,
        );
        assert_eq!(found.cached_tokens, Some(0));
    }
}
