"""Programs as environments: what they ask of an OpenAI or Anthropic address becomes trajectories.

    program ──HTTP──▶ gateway ──messages──▶ Session ──contexts──▶ rollout engine ──tokens──▶ Session ──▶ answer
                                                                                                   └──▶ sequences

Reading order: chat_messages, chat_tokens, session, outcomes, wire_formats, gateway, programs, function_program,
bash_agent, session_board.
"""
