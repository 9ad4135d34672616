from llm_functionalities.cli import main

main()
