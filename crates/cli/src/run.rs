//! `run`: answers one prompt and ends, or chats in the terminal.

use std::io::{IsTerminal, Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustyline::error::ReadlineError;
use serde_json::{Value as Json, json};
use tf_server::generate::token_sha;
use tf_text::chat::openai::{Defaults, EFFORTS, parse_effort};
use tf_text::chat::{Message, Part, Request, ResponseFormat, Thinking, ToolCall, ToolChoice};
use tf_text::reply::{Delta, FinishReason};

use crate::answer::{Answer, Asker};
use crate::arguments::{Arguments, Mistakes};
use crate::failure::Failure;
use crate::load;
use crate::logs::has_colour;
use crate::options::Environment;
use crate::resolve;

const HELP: &str = "\
/help               this text
/clear              forgets the conversation
/system TEXT        sets the system message
/think, /nothink    reasoning on or off
/effort LEVEL       none, low, high, max and others, or 1 to 100
/set NAME VALUE     temperature, top_p, top_k, min_p, seed, max_tokens
/save FILE          writes the conversation as JSON
/load FILE          reads one back
/stats              figures of the last reply
/bye                leaves; so does Ctrl-D
\"\"\"                 opens and closes a text of several lines
Ctrl-C stops a reply and keeps the conversation; at the prompt it drops the line, and twice in a row it leaves.
";

pub fn run(arguments: &Arguments, environment: &Environment) -> Result<(), Failure> {
    crate::logs::start(arguments);
    let (located, words) = load::located(arguments, environment, true)?;
    if words.len() > 1 {
        let text = format!("{:?} and {:?}: one prompt is answered; quote it", words[0], words[1]);
        return Err(Mistakes(vec![text]).into());
    }
    let is_terminal = std::io::stdin().is_terminal();
    let mut prompt = words.into_iter().next();
    if !is_terminal {
        // Piped text stands before the prompt, so that `run "Summarise:" < file` reads as it is typed.
        let mut piped = String::new();
        std::io::stdin()
            .read_to_string(&mut piped)
            .map_err(|error| Failure::run_time(format!("standard input can't be read: {error}")))?;
        let piped = piped.trim_end_matches(['\n', '\r']);
        prompt = match (prompt, piped.is_empty()) {
            (prompt, true) => prompt,
            (None, false) => Some(piped.to_owned()),
            (Some(prompt), false) => Some(format!("{piped}\n\n{prompt}")),
        };
        if prompt.is_none() {
            let text = "no prompt: give one as an argument or on standard input, or start `run` in a terminal to chat";
            return Err(Mistakes(vec![text.to_owned()]).into());
        }
    }

    let checked = load::checked(&located, arguments)?;
    let mut asker = Asker::start(&checked, arguments)?;
    asker.sampling = resolve::sampling(arguments, &checked.generation);
    asker.seed = arguments.integer("seed").map(|seed| seed as u64);
    asker.salt = arguments.text("seed-salt").unwrap_or_default().as_bytes().to_vec();
    asker.reasoning = resolve::reasoning_limits(arguments);
    asker.max_tokens = arguments.count("max-tokens").map(|count| count as u32);
    let mut chat = Chat {
        asker,
        thinking: resolve::chat(arguments),
        system: arguments.text("system").map(str::to_owned),
        messages: Vec::new(),
        screen: Screen::new(arguments.is_on("hide-reasoning")),
        last: None,
    };
    let stop = interrupts()?;
    match prompt {
        Some(prompt) => {
            let ended = chat.say(&prompt, &stop);
            chat.screen.end()?;
            ended?;
            if arguments.is_on("verbose") {
                eprint!("{}", chat.stats());
            }
            match chat.last.as_ref().is_some_and(|answer| answer.is_interrupted) {
                true => Err(Failure { code: 130, text: String::new() }),
                false => Ok(()),
            }
        }
        None => chat.talk(&stop, arguments.is_on("verbose")),
    }
}

/// Set by Ctrl-C while a reply is being written.
fn interrupts() -> Result<Arc<AtomicBool>, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&stop);
    std::thread::Builder::new().name("interrupts".to_owned()).spawn(move || {
        let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
        runtime.block_on(async move {
            while tokio::signal::ctrl_c().await.is_ok() {
                seen.store(true, Ordering::Relaxed);
            }
        });
    })?;
    Ok(stop)
}

/// A conversation.
struct Chat {
    asker: Asker,
    thinking: Defaults,
    system: Option<String>,
    messages: Vec<Message>,
    screen: Screen,
    last: Option<Answer>,
}

impl Chat {
    fn request(&self) -> Request {
        let system = self.system.iter().map(|text| Message::System { content: Part::text(text) });
        let effort = self.thinking.effort;
        Request {
            messages: system.chain(self.messages.iter().cloned()).collect(),
            tools: Vec::new(),
            tool_choice: ToolChoice::default(),
            parallel_tool_calls: true,
            response_format: ResponseFormat::Text,
            thinking: if self.thinking.thinking { Thinking::On(effort) } else { Thinking::Off },
            add_generation_prompt: true,
        }
    }

    /// Answers `text`; the turn is kept when there was an answer, an interrupted one too.
    fn say(&mut self, text: &str, stop: &AtomicBool) -> Result<(), Failure> {
        stop.store(false, Ordering::Relaxed);
        self.messages.push(Message::User { content: Part::text(text) });
        let request = self.request();
        let Chat { asker, screen, .. } = self;
        screen.begin();
        let answer = match asker.ask(&request, stop, &mut |delta| screen.show(delta)) {
            Ok(answer) => answer,
            Err(failure) => {
                self.messages.pop();
                return Err(failure);
            }
        };
        if answer.finish.reason == FinishReason::Length {
            screen.end()?;
            eprintln!("cut at {} tokens; --max-tokens and --context set the limit", answer.tokens.len());
        }
        let message = &answer.message;
        self.messages.push(Message::Assistant {
            content: Part::text(message.content.clone().unwrap_or_default()),
            reasoning: message.reasoning.clone().unwrap_or_default(),
            tool_calls: message
                .tool_calls
                .iter()
                .map(|call| ToolCall {
                    id: call.id.clone(),
                    name: call.name.clone(),
                    arguments: call.arguments.clone(),
                })
                .collect(),
            prefix: false,
        });
        self.last = Some(answer);
        Ok(())
    }

    fn talk(&mut self, stop: &AtomicBool, is_verbose: bool) -> Result<(), Failure> {
        let mut editor = rustyline::DefaultEditor::new()
            .map_err(|error| Failure::run_time(format!("the terminal can't be read: {error}")))?;
        eprintln!("/help lists the commands, /bye leaves");
        let mut was_interrupted = false;
        loop {
            let text = match read_turn(&mut editor) {
                Ok(text) => text,
                Err(ReadlineError::Interrupted) if !was_interrupted => {
                    was_interrupted = true;
                    eprintln!("Ctrl-C again, Ctrl-D or /bye leaves");
                    continue;
                }
                Err(ReadlineError::Eof | ReadlineError::Interrupted) => return Ok(()),
                Err(error) => return Err(Failure::run_time(format!("the terminal can't be read: {error}"))),
            };
            was_interrupted = false;
            if text.trim().is_empty() {
                continue;
            }
            // What can't be kept in a history can still be answered.
            let _ = editor.add_history_entry(&text);
            if let Some(command) = text.trim().strip_prefix('/') {
                match self.obey(command) {
                    Ok(true) => {}
                    Ok(false) => return Ok(()),
                    Err(problem) => eprintln!("{problem}"),
                }
                continue;
            }
            // A turn that failed is said and the conversation goes on.
            if let Err(failure) = self.say(&text, stop) {
                eprintln!("error: {}", failure.text);
            }
            self.screen.end()?;
            if is_verbose {
                eprint!("{}", self.stats());
            }
        }
    }

    /// Obeys a command; false ends the chat.
    fn obey(&mut self, command: &str) -> Result<bool, String> {
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        let rest = rest.trim();
        match name {
            "help" | "?" => eprint!("{HELP}"),
            "clear" => {
                self.messages.clear();
                self.last = None;
            }
            "system" => self.system = Some(rest.to_owned()).filter(|text| !text.is_empty()),
            "think" => self.thinking.thinking = true,
            "nothink" => self.thinking.thinking = false,
            "effort" => match parse_effort(rest) {
                Some(Some(effort)) => (self.thinking.effort, self.thinking.thinking) = (effort, true),
                Some(None) => self.thinking.thinking = false,
                None => return Err(format!("/effort {rest}: expected {EFFORTS}")),
            },
            "set" => self.set(rest)?,
            "save" => self.save(rest)?,
            "load" => self.load(rest)?,
            "stats" => eprint!("{}", self.stats()),
            "image" => return Err("images aren't built yet".to_owned()),
            "bye" | "exit" | "quit" => return Ok(false),
            other => return Err(format!("/{other} is not a command; /help lists them")),
        }
        Ok(true)
    }

    fn set(&mut self, rest: &str) -> Result<(), String> {
        const NAMES: &str = "temperature, top_p, top_k, min_p, seed, max_tokens";
        let (name, value) =
            rest.split_once(char::is_whitespace).ok_or(format!("/set NAME VALUE, NAME one of {NAMES}"))?;
        let value = value.trim();
        let number = |most: f32| match value.parse::<f32>() {
            Ok(number) if (0.0..=most).contains(&number) => Ok(number),
            _ => Err(format!("{name} must be a number from 0 to {most}, got {value:?}")),
        };
        let count = || value.parse::<u32>().map_err(|_| format!("{name} must be a whole number, got {value:?}"));
        match name {
            "temperature" => self.asker.sampling.temperature = number(100.0)?,
            "top_p" => self.asker.sampling.top_p = number(1.0)?,
            "min_p" => self.asker.sampling.min_p = number(1.0)?,
            "top_k" => self.asker.sampling.top_k = count()?,
            "max_tokens" => self.asker.max_tokens = Some(count()?),
            "seed" => {
                let seed = value.parse::<i64>().map_err(|_| format!("seed must be a whole number, got {value:?}"))?;
                self.asker.seed = Some(seed as u64);
            }
            other => return Err(format!("{other:?} can't be set; NAME is one of {NAMES}")),
        }
        Ok(())
    }

    fn save(&self, file: &str) -> Result<(), String> {
        if file.is_empty() {
            return Err("/save FILE".to_owned());
        }
        let conversation =
            json!({"system": self.system, "messages": self.messages.iter().map(message_json).collect::<Vec<_>>()});
        crate::output::write(Path::new(file), format!("{conversation:#}\n").as_bytes())
            .map_err(|error| format!("{file} can't be written: {error}"))
    }

    fn load(&mut self, file: &str) -> Result<(), String> {
        if file.is_empty() {
            return Err("/load FILE".to_owned());
        }
        let text =
            std::fs::read_to_string(Path::new(file)).map_err(|error| format!("{file} can't be read: {error}"))?;
        let conversation: Json = serde_json::from_str(&text)
            .map_err(|error| format!("{file} is not valid JSON: {}", tf_text::json::reason(&error)))?;
        let messages = conversation["messages"].as_array().ok_or(format!("{file} has no list of messages"))?;
        let messages = messages.iter().map(|message| message_of(message, file)).collect::<Result<Vec<_>, _>>()?;
        self.system = conversation["system"].as_str().map(str::to_owned);
        self.messages = messages;
        self.last = None;
        Ok(())
    }

    fn stats(&self) -> String {
        let Some(Answer { tokens, stats, .. }) = &self.last else { return "no reply yet\n".to_owned() };
        let rate = |count: u32, seconds: f64| if seconds > 0.0 { f64::from(count) / seconds } else { 0.0 };
        format!(
            "prompt {} tokens, {:.0} a second; reply {} tokens, {:.0} a second; {} cached; {} of {} drafts accepted; token_sha {}\n",
            stats.prompt_tokens,
            rate(stats.prompt_tokens - stats.cached_tokens, stats.prefill.as_secs_f64()),
            stats.reply_tokens,
            rate(stats.reply_tokens.saturating_sub(1), stats.decode.as_secs_f64()),
            stats.cached_tokens,
            stats.accepted,
            stats.drafted,
            token_sha(tokens)
        )
    }
}

/// One turn; `"""` opens and closes a text of several lines.
fn read_turn(editor: &mut rustyline::DefaultEditor) -> Result<String, ReadlineError> {
    let line = editor.readline("> ")?;
    let Some(first) = line.trim_start().strip_prefix("\"\"\"") else { return Ok(line) };
    let mut text = first.to_owned();
    loop {
        if let Some(end) = text.find("\"\"\"") {
            text.truncate(end);
            return Ok(text.trim_matches('\n').to_owned());
        }
        text += "\n";
        text += &editor.readline("... ")?;
    }
}

fn message_json(message: &Message) -> Json {
    let text = |parts: &[Part]| -> String {
        let texts = parts.iter().map(|part| match part {
            Part::Text(text) => text.as_str(),
            Part::Image { url } => url.as_str(),
        });
        texts.collect::<Vec<_>>().join("\n\n")
    };
    match message {
        Message::System { content } => json!({"role": "system", "content": text(content)}),
        Message::User { content } => json!({"role": "user", "content": text(content)}),
        Message::Assistant { content, reasoning, tool_calls, .. } => {
            let calls: Vec<Json> = tool_calls
                .iter()
                .map(|call| {
                    let function = json!({"name": call.name, "arguments": call.arguments});
                    json!({"id": call.id, "type": "function", "function": function})
                })
                .collect();
            let mut message = json!({"role": "assistant", "content": text(content), "reasoning_content": reasoning});
            if !calls.is_empty() {
                message["tool_calls"] = calls.into();
            }
            message
        }
        Message::Tool { content, call_id } => {
            json!({"role": "tool", "content": text(content), "tool_call_id": call_id})
        }
        Message::LatestReminder { content } => json!({"role": "latest_reminder", "content": text(content)}),
    }
}

fn message_of(message: &Json, file: &str) -> Result<Message, String> {
    let calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
    let content = match message["content"].as_str() {
        Some(content) => content,
        None if !calls.is_empty() => "",
        None => return Err(format!("{file}: a message has no content")),
    };
    let call = |call: &Json| {
        let text = |value: &Json| value.as_str().unwrap_or_default().to_owned();
        let function = &call["function"];
        ToolCall { id: text(&call["id"]), name: text(&function["name"]), arguments: text(&function["arguments"]) }
    };
    match message["role"].as_str() {
        Some("user") => Ok(Message::User { content: Part::text(content) }),
        Some("system") => Ok(Message::System { content: Part::text(content) }),
        Some("assistant") => Ok(Message::Assistant {
            content: Part::text(content),
            reasoning: message["reasoning_content"].as_str().unwrap_or_default().to_owned(),
            tool_calls: calls.iter().map(call).collect(),
            prefix: false,
        }),
        other => Err(format!("{file}: role {other:?} can't be continued here; user, assistant and system can")),
    }
}

/// The answer goes to stdout, the reasoning dimmed to stderr.
struct Screen {
    hides_reasoning: bool,
    is_dimmed: bool,
    dims: bool,
    /// Something was written since the last line end.
    is_open: bool,
    /// A call's bracket is open.
    is_in_call: bool,
}

impl Screen {
    fn new(hides_reasoning: bool) -> Screen {
        Screen {
            hides_reasoning,
            is_dimmed: false,
            dims: has_colour(std::io::stderr().is_terminal()),
            is_open: false,
            is_in_call: false,
        }
    }

    fn begin(&mut self) {
        self.is_dimmed = false;
        self.is_open = false;
        self.is_in_call = false;
    }

    fn show(&mut self, delta: &Delta) -> std::io::Result<()> {
        match delta {
            Delta::Reasoning { .. } if self.hides_reasoning => Ok(()),
            Delta::Reasoning { text, .. } => {
                let mut stderr = std::io::stderr().lock();
                if self.dims && !self.is_dimmed {
                    write!(stderr, "\x1b[2m")?;
                }
                self.is_dimmed = true;
                write!(stderr, "{text}")?;
                stderr.flush()
            }
            Delta::Content { text, .. } => self.write(text),
            Delta::CallStart { name, .. } => {
                self.close_call()?;
                self.write(&format!("{}{name}(", if self.is_open { "\n" } else { "" }))?;
                self.is_in_call = true;
                Ok(())
            }
            Delta::CallArguments { text, .. } => self.write(text),
        }
    }

    fn write(&mut self, text: &str) -> std::io::Result<()> {
        self.close_reasoning()?;
        let mut stdout = std::io::stdout().lock();
        stdout.write_all(text.as_bytes())?;
        stdout.flush()?;
        self.is_open |= !text.is_empty();
        Ok(())
    }

    fn close_reasoning(&mut self) -> std::io::Result<()> {
        if !self.is_dimmed {
            return Ok(());
        }
        self.is_dimmed = false;
        let mut stderr = std::io::stderr().lock();
        writeln!(stderr, "{}", if self.dims { "\x1b[0m" } else { "" })?;
        stderr.flush()
    }

    fn close_call(&mut self) -> std::io::Result<()> {
        match std::mem::take(&mut self.is_in_call) {
            true => self.write(")"),
            false => Ok(()),
        }
    }

    /// Ends the line, whatever the reply ended with.
    fn end(&mut self) -> std::io::Result<()> {
        self.close_reasoning()?;
        self.close_call()?;
        if self.is_open {
            let mut stdout = std::io::stdout().lock();
            writeln!(stdout)?;
            stdout.flush()?;
        }
        self.is_open = false;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_saved_call_is_there_when_it_is_loaded() {
        let call = ToolCall { id: "call_1".into(), name: "weather".into(), arguments: "{\"city\": \"Paris\"}".into() };
        let turns = [
            Message::User { content: Part::text("What is the weather in Paris?") },
            Message::Assistant {
                content: Part::text(""),
                reasoning: "Ask.".into(),
                tool_calls: vec![call],
                prefix: false,
            },
        ];
        for turn in &turns {
            assert_eq!(message_of(&message_json(turn), "t.json").as_ref(), Ok(turn));
        }
        let null = json!({"role": "assistant", "content": null, "tool_calls": message_json(&turns[1])["tool_calls"]});
        assert!(message_of(&null, "t.json").is_ok());
        assert!(message_of(&json!({"role": "user", "content": null}), "t.json").is_err());
    }
}
