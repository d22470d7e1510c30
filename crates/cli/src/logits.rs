//! `logits`: rows of logits for given tokens, with digests. The pieces a prompt is cut into, the sequences beside it and
//! the way to a position are the user's choice; the bits must not depend on them.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value as Json, json};
use sha2::{Digest, Sha256};
use tf_engine::model::{Model, RoundPlan, SlotIndex, Window};
use tf_kernels::numerics_policy::Numerics;
use tf_model::deepseek_v41::reference::{self, Dimensions, Stored, dequantise};
use tf_model::deepseek_v41::{DeepseekV41, Options};
use tf_numerics::math;
use tf_text::chat::openai::chat_body;
use tf_text::fields::Fields;
use tf_text::json::reason;

use crate::arguments::{Arguments, Mistakes};
use crate::failure::{Failure, print};
use crate::load::{self, Checked};
use crate::options::Environment;
use crate::output;

/// Which rows are printed.
enum Positions {
    All,
    Last,
    Some(Vec<usize>),
}

/// How the tokens are fed.
struct Feeding {
    /// Sizes of the pieces; the last repeats. Empty: as large as a round allows.
    chunk: Vec<usize>,
    /// From here on one token at a time.
    decode: Option<usize>,
    /// Sequences in each round, this one included.
    rows: usize,
}

/// The draft head's round after the last token.
struct Drafts {
    ids: Vec<i64>,
    logits: Vec<f32>,
    confidence: Vec<f32>,
}

pub fn run(arguments: &Arguments, environment: &Environment) -> Result<(), Failure> {
    crate::logs::start(arguments);
    let (located, _) = load::located(arguments, environment, false)?;
    let positions = positions(arguments)?;
    let chunk = chunk(arguments)?;
    let checked = load::checked(&located, arguments)?;
    let lists = ids(arguments, &checked)?;
    let output = arguments.text("output");
    if let Some(file) = output {
        output::check("output", file)?;
    }
    let (rows, most) = (arguments.count("rows").unwrap_or(1), checked.loading.options.round_rows);
    if rows > u64::from(most) {
        return Err(usage(&format!("--rows {rows} is more than the {most} rows of a round. Use fewer")));
    }
    if output.is_some() && lists.len() > 1 {
        return Err(usage("--output holds one list of tokens, and several are given. Run them one by one"));
    }
    let drafts = arguments.is_on("drafts");
    let decode = arguments.count("decode").map(|from| from as usize);
    let feeding = Feeding { chunk, decode, rows: rows as usize };
    let policy = match arguments.text("reference") {
        Some("exact") => Some(Numerics::Exact),
        Some("qdq") => Some(Numerics::Qdq),
        Some("release") => Some(Numerics::Release),
        _ => None,
    };
    let longest = lists.iter().map(Vec::len).max().unwrap_or(0);
    let mut source = match policy {
        Some(policy) => Source::Reference(Box::new(reference(&checked, policy)?)),
        None => {
            let options = Options {
                slots: feeding.rows as u32,
                context: longest as u32,
                halo: true,
                ..checked.loading.options.clone()
            };
            if longest > checked.shape.max_position_embeddings {
                let limit = checked.shape.max_position_embeddings;
                return Err(usage(&format!("{longest} tokens are more than this model's {limit} positions")));
            }
            Source::Backend(Box::new(checked.model(options)?))
        }
    };
    for ids in &lists {
        if drafts && ids.len() < 2 {
            return Err(usage(
                "--drafts needs at least two tokens: the draft head reads the positions before the last",
            ));
        }
        if let Some(from) = decode.filter(|from| *from >= ids.len()) {
            let last = ids.len() - 1;
            return Err(usage(&format!(
                "--decode {from} leaves no token to decode: {} tokens are given, so FROM is at most {last}",
                ids.len()
            )));
        }
        let wanted = wanted(&positions, ids.len())?;
        let (logits, drafts) = source.rows(ids, &wanted, &feeding, drafts, &positions)?;
        let vocab = checked.shape.vocab_size;
        let top = arguments.count("top").unwrap_or(5) as usize;
        let mut text = String::new();
        for (position, row) in wanted.iter().zip(logits.chunks_exact(vocab)) {
            text += &format!("{}\n", line(*position, ids[*position], row, top));
        }
        if let Some(drafts) = &drafts {
            let probabilities: Vec<f32> = drafts.confidence.iter().map(|raw| math::sigmoid(*raw)).collect();
            text += &format!(
                "{}\n",
                json!({"draft_ids": drafts.ids, "draft_confidence": drafts.confidence, "draft_probability": probabilities})
            );
        }
        print(&text)?;
        if let Some(file) = output {
            write(Path::new(file), ids, &logits, vocab, drafts.as_ref())?;
        }
    }
    Ok(())
}

fn usage(text: &str) -> Failure {
    Mistakes(vec![text.to_owned()]).into()
}

fn positions(arguments: &Arguments) -> Result<Positions, Failure> {
    match arguments.text("positions").unwrap_or("last") {
        "last" => Ok(Positions::Last),
        "all" => Ok(Positions::All),
        list => list
            .split(',')
            .map(|text| text.trim().parse().ok())
            .collect::<Option<Vec<_>>>()
            .map(Positions::Some)
            .ok_or_else(|| usage(&format!("--positions takes all, last, or a list like 3,7,64, not {list:?}"))),
    }
}

fn wanted(positions: &Positions, length: usize) -> Result<Vec<usize>, Failure> {
    match positions {
        Positions::All => Ok((0..length).collect()),
        Positions::Last => Ok(vec![length - 1]),
        Positions::Some(list) => match list.iter().find(|position| **position >= length) {
            Some(position) => {
                Err(usage(&format!("--positions {position} is behind the last token, which stands at {}", length - 1)))
            }
            None => Ok(list.clone()),
        },
    }
}

fn chunk(arguments: &Arguments) -> Result<Vec<usize>, Failure> {
    match arguments.text("chunk") {
        None | Some("auto" | "whole") => Ok(Vec::new()),
        Some(list) => list
            .split(',')
            .map(|text| text.trim().parse().ok().filter(|size| *size > 0))
            .collect::<Option<_>>()
            .ok_or_else(|| usage(&format!("--chunk takes whole or a list like 128,1,60, not {list:?}"))),
    }
}

/// The token lists, each checked against the vocabulary.
fn ids(arguments: &Arguments, checked: &Checked) -> Result<Vec<Vec<u32>>, Failure> {
    let given = ["ids", "ids-file", "prompt", "request"].iter().filter(|flag| arguments.is_given(flag)).count();
    if given != 1 {
        return Err(usage("give the tokens once: --ids, --ids-file, --prompt or --request"));
    }
    let failed = |text: String| Failure::run_time(text);
    let lists: Vec<Vec<u32>> = if let Some(list) = arguments.list("ids") {
        let read = |text: &String| text.trim().parse::<u32>().ok();
        vec![
            list.iter()
                .map(read)
                .collect::<Option<_>>()
                .ok_or_else(|| usage("--ids takes token ids like 0,213,331"))?,
        ]
    } else if let Some(file) = arguments.text("ids-file") {
        let text = output::read("ids-file", file)?;
        let invalid = |error: serde_json::Error| failed(format!("{file} is not valid JSON: {}", reason(&error)));
        let json: Json = serde_json::from_str(&text).map_err(invalid)?;
        let list = |json: &Json| -> Option<Vec<u32>> {
            json.as_array()?.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect()
        };
        let lists = match list(&json) {
            Some(ids) => Some(vec![ids]),
            None => json.as_array().and_then(|lists| lists.iter().map(list).collect()),
        };
        lists.ok_or_else(|| failed(format!("{file} is no list of token ids and no list of such lists")))?
    } else if let Some(text) = arguments.text("prompt") {
        vec![checked.tokenizer.encode_with_markers(text).map_err(|error| failed(error.to_string()))?]
    } else {
        let file = arguments.text("request").unwrap_or_default();
        let text = output::read("request", file)?;
        let body = tf_text::json::Value::parse(&text).map_err(|error| failed(format!("{file}: {error}")))?;
        let fields = Fields::of_body(&body).map_err(|error| failed(format!("{file}: {error}")))?;
        let body =
            chat_body(&fields, crate::resolve::chat(arguments)).map_err(|error| failed(format!("{file}: {error}")))?;
        let prompt = tf_text::chat::encode(&body.request).map_err(|error| failed(format!("{file}: {error}")))?;
        vec![prompt.token_ids(&checked.tokenizer).map_err(|error| failed(error.to_string()))?]
    };
    let vocab = checked.shape.vocab_size;
    for ids in &lists {
        if ids.is_empty() {
            return Err(usage("the list of tokens is empty; a model needs at least one"));
        }
        if let Some(id) = ids.iter().find(|id| **id as usize >= vocab) {
            return Err(usage(&format!("token {id} is outside the vocabulary of {vocab}")));
        }
    }
    match lists.is_empty() {
        true => Err(usage("there is no list of tokens")),
        false => Ok(lists),
    }
}

/// What computes the rows.
enum Source {
    Backend(Box<DeepseekV41>),
    Reference(Box<reference::Model>),
}

impl Source {
    /// Logits of the wanted positions, and the draft head's round after the last.
    fn rows(
        &mut self,
        ids: &[u32],
        wanted: &[usize],
        feeding: &Feeding,
        drafts: bool,
        positions: &Positions,
    ) -> Result<(Vec<f32>, Option<Drafts>), Failure> {
        match self {
            Source::Backend(model) => {
                let is_last = matches!(positions, Positions::Last);
                let rows = backend_rows(model, ids, wanted, feeding, is_last)?;
                let mut round = None;
                if drafts {
                    round = Some(backend_drafts(model, &rows, wanted, ids.len())?);
                }
                for slot in 0..feeding.rows {
                    model.release(SlotIndex(slot as u32));
                }
                Ok((rows, round))
            }
            Source::Reference(model) => Ok(reference_rows(model, ids, wanted, feeding, drafts)),
        }
    }
}

/// Where each piece begins and ends.
fn pieces(length: usize, feeding: &Feeding, rows_max: usize) -> Vec<(usize, usize)> {
    let prompt = feeding.decode.map_or(length, |from| from.min(length));
    let mut sizes = feeding.chunk.iter().copied();
    let mut size = sizes.next().unwrap_or(rows_max);
    let mut pieces = Vec::new();
    let mut start = 0;
    while start < length {
        let most = if start < prompt { size.min(prompt - start) } else { 1 };
        let end = start + most.min(rows_max);
        pieces.push((start, end));
        start = end;
        size = sizes.next().unwrap_or(size);
    }
    pieces
}

fn backend_rows(
    model: &mut DeepseekV41,
    ids: &[u32],
    wanted: &[usize],
    feeding: &Feeding,
    is_last: bool,
) -> Result<Vec<f32>, Failure> {
    let vocab = model.shape().vocab_size;
    let rows_max = (model.options().round_rows as usize / feeding.rows).max(1);
    let prompt = feeding.decode.map_or(ids.len(), |from| from.min(ids.len())) as u32;
    let mut kept: BTreeMap<usize, Vec<f32>> = BTreeMap::new();
    let mut logits = Vec::new();
    for (start, end) in pieces(ids.len(), feeding, rows_max) {
        let mut plan = RoundPlan::default();
        for slot in 0..feeding.rows {
            let first = plan.tokens.len();
            // Sequences beside this one hold other tokens.
            plan.tokens.extend(ids[start..end].iter().map(|id| (id + 17 * slot as u32) % vocab as u32));
            let draws = match slot {
                0 if !is_last => 0..end - start,
                0 if end == ids.len() => end - start - 1..end - start,
                _ => 0..0,
            };
            plan.windows.push(Window {
                slot: SlotIndex(slot as u32),
                start: start as u32,
                rows: first..plan.tokens.len(),
                prompt_end: if (start as u32) < prompt { prompt } else { start as u32 },
                whole: !is_last,
                draw: draws,
                logprobs: None,
                sequence: slot,
            });
        }
        logits.clear();
        model.logits_rows(&plan, &mut logits).map_err(|error| Failure::run_time(error.to_string()))?;
        for slot in 0..feeding.rows {
            model.keep(SlotIndex(slot as u32), end as u32);
        }
        let first = end - logits.len() / vocab;
        for (row, position) in logits.chunks_exact(vocab).zip(first..end) {
            if wanted.contains(&position) {
                kept.insert(position, row.to_vec());
            }
        }
    }
    wanted
        .iter()
        .map(|position| kept.get(position).cloned())
        .collect::<Option<Vec<_>>>()
        .map(|rows| rows.concat())
        .ok_or_else(|| Failure::run_time("a wanted row was not computed"))
}

/// Ties to the lowest id.
fn argmax(row: &[f32]) -> usize {
    let mut best = 0;
    for (id, value) in row.iter().enumerate() {
        if *value > row[best] {
            best = id;
        }
    }
    best
}

fn backend_drafts(model: &mut DeepseekV41, rows: &[f32], wanted: &[usize], length: usize) -> Result<Drafts, Failure> {
    let vocab = model.shape().vocab_size;
    let Some(last) = wanted.iter().position(|position| *position == length - 1) else {
        return Err(usage("--drafts begins after the last token: ask for its row too, with --positions last or all"));
    };
    let anchor = argmax(&rows[last * vocab..(last + 1) * vocab]) as u32;
    let found = model
        .draft_rows(SlotIndex(0), anchor)
        .map_err(|error| Failure::run_time(error.to_string()))?
        .ok_or_else(|| Failure::run_time("this model is loaded without its draft head; leave --draft off out"))?;
    let ids = std::iter::once(anchor).chain(found.tokens).map(i64::from).collect();
    Ok(Drafts { ids, logits: found.logits, confidence: found.confidence })
}

fn reference(checked: &Checked, policy: Numerics) -> Result<reference::Model, Failure> {
    let failed = |text: String| Failure::run_time(text);
    let config = checked.checkpoint.required_file("config.json").map_err(|error| failed(error.to_string()))?;
    let invalid = |error: serde_json::Error| failed(format!("config.json is not valid JSON: {}", reason(&error)));
    let config: Json = serde_json::from_slice(&config).map_err(invalid)?;
    let dimensions = Dimensions::from_config(&config).map_err(|error| failed(error.to_string()))?;
    let stored = |name: &str| {
        checked.checkpoint.view(name).map(|view| Stored {
            dtype: view.dtype.name(),
            shape: view.shape.to_vec(),
            bytes: view.bytes,
        })
    };
    let fetch = &mut |name: &str| {
        let tensor = stored(name).ok_or("the checkpoint does not hold it")?;
        let scale = name.strip_suffix(".weight").and_then(|stem| stored(&format!("{stem}.scale")));
        dequantise(name, &tensor, scale.as_ref())
    };
    reference::Model::load(dimensions, policy, checked.hash.token_map().to_vec(), fetch)
        .map_err(|error| failed(error.to_string()))
}

fn reference_rows(
    model: &reference::Model,
    ids: &[u32],
    wanted: &[usize],
    feeding: &Feeding,
    drafts: bool,
) -> (Vec<f32>, Option<Drafts>) {
    let vocab = model.dimensions.vocab_size;
    let mut state = model.start();
    let mut record = reference::Record::off();
    let mut rows = Vec::with_capacity(ids.len() * vocab);
    for (start, end) in pieces(ids.len(), feeding, usize::MAX) {
        let forward = model.forward(&mut state, &ids[start..end], &mut record);
        rows.extend(forward.logits.iter().map(|value| *value as f32));
    }
    let round = drafts.then(|| {
        let anchor = argmax(&rows[(ids.len() - 1) * vocab..]) as u32;
        let draft = model.draft(&state, anchor, &mut record);
        Drafts {
            ids: std::iter::once(anchor).chain(draft.ids.iter().copied()).map(i64::from).collect(),
            logits: draft.logits.iter().map(|value| *value as f32).collect(),
            confidence: draft.confidence.iter().map(|value| *value as f32).collect(),
        }
    });
    let kept = wanted.iter().flat_map(|position| rows[position * vocab..(position + 1) * vocab].iter().copied());
    (kept.collect(), round)
}

/// One position as a JSON line.
fn line(position: usize, token: u32, row: &[f32], top: usize) -> Json {
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|a, b| row[*b].total_cmp(&row[*a]).then(a.cmp(b)));
    let most = row[order[0]];
    // Shown, not drawn from: a plain float64 sum serves.
    let sum: f64 = row.iter().map(|value| f64::from(math::exp(value - most))).sum();
    let shift = f64::from(most) + f64::from(math::ln(sum as f32));
    let likeliest: Vec<Json> =
        order.iter().take(top).map(|id| json!([id, row[*id], (f64::from(row[*id]) - shift) as f32])).collect();
    json!({
        "position": position,
        "token": token,
        "argmax": argmax(row),
        "top": likeliest,
        "sha": digest(row),
    })
}

/// First 16 hexadecimal digits of SHA-256 over the row's float32 bits, little-endian.
fn digest(row: &[f32]) -> String {
    let mut digest = Sha256::new();
    for value in row {
        digest.update(value.to_bits().to_le_bytes());
    }
    digest.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

fn write(file: &Path, ids: &[u32], logits: &[f32], vocab: usize, drafts: Option<&Drafts>) -> Result<(), Failure> {
    let floats = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let integers = |values: &[i64]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let ids: Vec<i64> = ids.iter().map(|id| i64::from(*id)).collect();
    let mut parts = vec![
        ("ids", Dtype::I64, vec![ids.len()], integers(&ids)),
        ("logits", Dtype::F32, vec![logits.len() / vocab, vocab], floats(logits)),
    ];
    if let Some(drafts) = drafts {
        parts.push(("draft_ids", Dtype::I64, vec![drafts.ids.len()], integers(&drafts.ids)));
        parts.push(("draft_logits", Dtype::F32, vec![drafts.logits.len() / vocab, vocab], floats(&drafts.logits)));
        parts.push(("draft_confidence", Dtype::F32, vec![drafts.confidence.len()], floats(&drafts.confidence)));
    }
    let failed = |text: String| Failure::run_time(format!("{} can't be written: {text}", file.display()));
    let views = parts
        .iter()
        .map(|(name, dtype, shape, bytes)| {
            TensorView::new(*dtype, shape.clone(), bytes)
                .map(|view| (*name, view))
                .map_err(|error| failed(error.to_string()))
        })
        .collect::<Result<Vec<_>, _>>()?;
    let bytes = safetensors::serialize(views, None).map_err(|error| failed(error.to_string()))?;
    output::write(file, &bytes).map_err(|error| failed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_is_cut_as_asked_and_decoded_one_by_one() {
        let feeding = |chunk: &[usize], decode| Feeding { chunk: chunk.to_vec(), decode, rows: 1 };
        assert_eq!(pieces(7, &feeding(&[], None), 512), [(0, 7)]);
        assert_eq!(pieces(7, &feeding(&[], None), 3), [(0, 3), (3, 6), (6, 7)]);
        assert_eq!(pieces(9, &feeding(&[4, 1, 2], None), 512), [(0, 4), (4, 5), (5, 7), (7, 9)]);
        assert_eq!(pieces(6, &feeding(&[], Some(4)), 512), [(0, 4), (4, 5), (5, 6)]);
        assert_eq!(pieces(3, &feeding(&[], Some(9)), 512), [(0, 3)]);
    }

    #[test]
    fn ties_go_to_the_lowest_id() {
        assert_eq!(argmax(&[1.0, 3.0, 3.0, 2.0]), 1);
        let line = line(0, 5, &[1.0, 3.0, 3.0, 2.0], 3);
        assert_eq!(line["argmax"], 1);
        assert_eq!(line["top"][1][0], 2);
        assert!((line["top"][0][2].as_f64().unwrap() + 0.917_6).abs() < 1e-3, "{line}");
    }
}
