//! `selftest`: proves the laws of exactness on this machine, backend and model. A line a law with what was exercised, and
//! one digest over the compared bits, the same on every run of the same build and model.

use std::time::Instant;

use serde_json::json;
use sha2::{Digest, Sha256};
use tf_model::deepseek_v41::Fault;
use tf_model::deepseek_v41::laws::{Extent, LAWS, Law, Subject};

use crate::arguments::{Arguments, Mistakes};
use crate::device::{Arithmetic, arithmetic};
use crate::failure::{Failure, print};
use crate::load;
use crate::options::Environment;

/// Where the laws' tokens come from: any text will do, this one has words, numbers, lists and marks.
const TEXT: &str = "A sheltered port is a harbor; 12 + 30 = 42, and the code of Iris is SK72. {\"city\": \"Rome\", \"job\": \
    \"singer\"} Monday, Tuesday, Wednesday: three days. Read these lines, then count from 97 to 103 and spell the word. \
    The storm grounded the ship, she shook the salt out of the salt shaker, and nobody asked why.";

/// A law that one device can't show.
const NOT_APPLICABLE: &[(&str, &str, &str)] = &[("L6", "ranks", "one device: there are no ranks to compare")];

pub fn run(arguments: &Arguments, environment: &Environment) -> Result<(), Failure> {
    crate::logs::start(arguments);
    let (located, _) = load::located(arguments, environment, false)?;
    let wanted = wanted(arguments)?;
    let checked = load::checked(&located, arguments)?;
    let options = checked.loading.options.clone();
    let tokens = checked.tokenizer.encode_plain(TEXT).map_err(|error| Failure::run_time(error.to_string()))?;
    let weights = checked.weights(options.threads, &|_| {})?;
    let mut subject = Subject::new(checked.shape.clone(), weights, checked.hash.clone(), options.clone(), &tokens)
        .map_err(Failure::run_time)?;
    subject.extent = if arguments.is_on("quick") { Extent::Quick } else { Extent::Full };

    let is_json = arguments.is_on("json");
    let mut total = Sha256::new();
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    if let Some(found) = arithmetic(&checked.device)? {
        match (found.compared, found.differ) {
            (1.., 0) => passed += 1,
            _ => failed += 1,
        }
        print(&format!("{}\n", ground(&found, is_json)))?;
    }
    let on_gpu = checked.device.backend().is_some();
    for law in LAWS.iter().filter(|law| wanted.contains(&law.id) && !(law.cpu_only && on_gpu)) {
        let started = Instant::now();
        let result = (law.run)(&subject, Fault::None);
        let seconds = started.elapsed().as_secs_f64();
        let line = match result {
            Ok(evidence) => {
                passed += 1;
                total.update(evidence.digest());
                let digest = hex(&evidence.digest()[..8]);
                match is_json {
                    true => json!({"law": law.id, "title": law.title, "result": "pass", "digest": digest,
                        "exercised": evidence.counts.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect::<std::collections::BTreeMap<_, _>>()})
                    .to_string(),
                    false => {
                        let shown: Vec<String> = evidence.counts.iter().map(|(name, count)| format!("{count} {name}")).collect();
                        format!("PASS {:<2} {:<32} {digest}  {} ({seconds:.1} s)", law.id, law.title, shown.join(", "))
                    }
                }
            }
            Err(difference) => {
                failed += 1;
                total.update(difference.as_bytes());
                verdict(is_json, law, "FAIL", &difference)
            }
        };
        print(&format!("{line}\n"))?;
    }
    let of_the_cpu = LAWS.iter().filter(|law| law.cpu_only && on_gpu);
    let of_the_cpu = of_the_cpu.map(|law| (law.id, law.title, "a GPU does the work: no bit can depend on the CPU"));
    for (id, title, reason) in of_the_cpu.chain(NOT_APPLICABLE.iter().copied()).filter(|(id, ..)| wanted.contains(id)) {
        skipped += 1;
        let line = match is_json {
            true => json!({"law": id, "title": title, "result": "not applicable", "reason": reason}).to_string(),
            false => format!("-    {id:<2} {title:<32} not applicable: {reason}"),
        };
        print(&format!("{line}\n"))?;
    }
    let digest = hex(&total.finalize());
    let line = match is_json {
        true => json!({"passed": passed, "failed": failed, "not_applicable": skipped, "model": checked.name,
            "fingerprint": checked.fingerprint, "backend": crate::device::backend(&checked.device), "digest": digest})
        .to_string(),
        false => format!(
            "{}: {passed} passed, {failed} failed, {skipped} not applicable; {} on {}; digest {digest}",
            if failed == 0 { "PASS" } else { "FAIL" },
            checked.name,
            crate::device::backend(&checked.device)
        ),
    };
    print(&format!("{line}\n"))?;
    match failed {
        0 => Ok(()),
        _ => Err(Failure { code: 1, text: String::new() }),
    }
}

/// The answer of a GPU about its arithmetic, as a line.
fn ground(found: &Arithmetic, is_json: bool) -> String {
    let Arithmetic { title, compared, differ, first } = found;
    let result = if *compared > 0 && *differ == 0 { "pass" } else { "fail" };
    match is_json {
        true => json!({"law": "G0", "title": title, "result": result, "compared": compared, "differ": differ,
            "first": first})
        .to_string(),
        false => {
            let (result, first) = (result.to_uppercase(), first.as_deref().unwrap_or(""));
            let line = format!("{result} G0 {title:<32} {compared} results compared, {differ} differ {first}");
            line.trim_end().to_owned()
        }
    }
}

fn verdict(is_json: bool, law: &Law, result: &str, difference: &str) -> String {
    match is_json {
        true => json!({"law": law.id, "title": law.title, "result": "fail", "difference": difference}).to_string(),
        false => format!("{result} {:<2} {:<32} {difference}", law.id, law.title),
    }
}

/// The laws that were asked for, all without `--laws`.
fn wanted(arguments: &Arguments) -> Result<Vec<&'static str>, Failure> {
    let mut known: Vec<&'static str> =
        LAWS.iter().map(|law| law.id).chain(NOT_APPLICABLE.iter().map(|(id, ..)| *id)).collect();
    known.dedup();
    let Some(names) = arguments.list("laws") else { return Ok(known) };
    let mut wanted = Vec::new();
    for name in names {
        match known.iter().find(|id| id.eq_ignore_ascii_case(name.trim())) {
            Some(id) => wanted.push(*id),
            None => return Err(Mistakes(vec![format!("--laws takes {}, not {name:?}", known.join(","))]).into()),
        }
    }
    Ok(wanted)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
